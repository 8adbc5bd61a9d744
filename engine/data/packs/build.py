"""Builds a pack: a dataset tokenized for one model and packed into windows, once per fingerprint.

    manifest.json         written last: a directory with a manifest is a complete pack
    shard-00000.parquet   one row per window: input_ids, labels (-100: no loss), seq_lengths of the examples in it
    val-00000.parquet     the same for the validation part, if any
    rows.parquet          one row per training window: the rows of the uploaded file in it, in order

A pack of preferences has one row per pair or per judged answer instead (``answer_packs.py``).
Equal inputs give byte-identical ids, whatever the number of workers. Building again under the same fingerprint does no work; after a crash
the finished token shards are used and at most one per worker is repeated.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from core.errors import IntegrityError, InvalidDataset, InvalidRequest
from engine.data.packs.answer_packs import write_answer_files
from engine.data.packs.manifest import MANIFEST, PackManifest, verify_pack
from engine.data.packs.pack_settings import PACK_FORMAT, PackKind, PackSettings, pack_fingerprint
from engine.data.packs.safety_mix import safety_counts
from engine.data.packs.source import Source
from engine.data.packs.token_shard_build import PackProgress, ProgressCallback, Tokenized, tokenize
from engine.data.packs.windows import PartManifest, choose_window, longest_example, write_windows
from engine.data.split import Part
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.token_shards import EncodingTally

log = logging.getLogger(__name__)


def build_pack(
    source: Source,
    tokenizer: ChatTokenizer,
    settings: PackSettings,
    out_dir: Path,
    *,
    dataset_id: str,
    kind: PackKind = "windows",
    validation: Source = (),
    workers: int = 1,
    model_dir: Path | None = None,
    progress: ProgressCallback | None = None,
) -> PackManifest:
    """Builds the pack of `source` in `out_dir`; an existing one with the same fingerprint is returned unchanged.

    `kind`: ``windows`` of packed examples, ``pairs`` of a prompt with a chosen and a rejected answer, or single answers ``judged`` good or
    bad, refused if the training part holds one label only. `validation` is the tenant's own validation file; without it
    `settings.validation_fraction` is held out. More than one of `workers` requires `model_dir`, the directory that `tokenizer` was loaded
    from. Raises ``InvalidDataset`` if a policy refuses an example or nothing is left to train on.
    """
    if kind != "windows":
        _check_answers(settings)
    if workers > 1 and model_dir is None:
        raise ValueError(f"{workers} workers need model_dir, from which each loads the tokenizer")
    fingerprint = pack_fingerprint(dataset_id, tokenizer.tokenizer_digest, tokenizer.template_digest, settings, kind=kind)
    if (found := _finished(out_dir, fingerprint)) is not None:
        return found
    tokenizer.check_stop_token()
    out_dir.mkdir(parents=True, exist_ok=True)
    report = progress or (lambda _: None)
    tokens_dir = out_dir / f".tokens-{fingerprint}"
    tokenized = tokenize(source, validation, tokenizer, settings, tokens_dir, report, kind=kind, workers=workers, model_dir=model_dir)
    tally = tokenized.tally()
    for part in tokenized.shards:
        _enforce(tokenized.tally(part), settings, part)
    window = choose_window(tokenized.shards["train"], settings) if kind == "windows" else None
    parts = _write_parts(kind, tokenized, settings, window, out_dir, fingerprint, workers, report)
    if "train" not in parts:
        raise _nothing_left(tokenized.tally("train"), settings)
    _check_labels(parts["train"], tally)
    train, held_out = parts["train"], parts.get("validation")
    manifest = PackManifest(
        fingerprint=fingerprint,
        dataset_id=dataset_id,
        kind=kind,
        max_seq_len=_longest(tokenized, settings, window),
        window=window,
        tokenizer_digest=tokenizer.tokenizer_digest,
        template_digest=tokenizer.template_digest,
        settings=settings.shaping(),
        validation=held_out.to_dict() if held_out else None,
        truncated=tally.truncated,
        split=tally.split,
        untrained_turns=tally.untrained_turns,
        openings=tally.openings,
        dropped=tally.dropped,
        dropped_rows=tally.dropped_rows,
        lengths=train.lengths,
        rows=train.rows,
        safety=safety_counts(tokenized.num_train, share=settings.safety_share, file=settings.safety_file),
        format=PACK_FORMAT,
        **train.to_dict(),
    )
    manifest.write(out_dir)
    shutil.rmtree(tokens_dir, ignore_errors=True)
    return manifest


build_preference_pack = functools.partial(build_pack, kind="pairs")
build_judged_pack = functools.partial(build_pack, kind="judged")


def _check_answers(settings: PackSettings) -> None:
    """Refuses settings that apply to conversations only."""
    if settings.safety_share:
        raise InvalidRequest("safety_share mixes conversations, and preferences are judged answers; set it to 0", param="safety_share")
    if settings.loss_on_inputs:
        raise InvalidRequest(
            "train_on_inputs teaches prompts, and a preference method compares answers alone; leave it out", param="train_on_inputs"
        )


def _check_labels(part: PartManifest, tally: EncodingTally) -> None:
    """Refuses answers that are all good or all bad: training would have nothing to distinguish."""
    if part.num_desirable is None or (part.num_desirable and part.num_undesirable):
        return
    label, other = ("good", "bad") if part.num_desirable else ("bad", "good")
    dropped = f" ({_spell(tally)})" if tally.dropped else ""
    raise InvalidDataset(
        f"all {part.num_examples} answers for training are {label}{dropped}; a method that learns from judgements needs both: add {other} "
        "answers (label true is good, false is bad), or train on the good ones as conversations with method sft",
        code="one_label",
    )


def _finished(out_dir: Path, fingerprint: str) -> PackManifest | None:
    """Returns the complete pack in `out_dir`; removes a damaged one, or one with another fingerprint."""
    if not (out_dir / MANIFEST).is_file():
        return None
    try:
        manifest = verify_pack(out_dir)
        if manifest.fingerprint == fingerprint:
            return manifest
    except IntegrityError as damage:
        log.warning("building again: %s", damage)
    (out_dir / MANIFEST).unlink()
    for file in out_dir.glob("*.parquet"):
        file.unlink()
    return None


def _write_parts(
    kind: PackKind, tokenized: Tokenized, settings: PackSettings, window: int | None, out_dir: Path, key: str, threads: int,
    report: ProgressCallback,
) -> Mapping[Part, PartManifest]:  # fmt: skip
    """Builds the files of each part that has examples."""
    parts: dict[Part, PartManifest] = {}
    for part, shards in tokenized.shards.items():
        if not any(s.tally.num_examples for s in shards):
            continue

        def written(num_examples: int, num_tokens: int, part: Part = part) -> None:
            report(PackProgress(stage="pack", part=part, num_examples=num_examples, num_tokens=num_tokens))

        if window is None:
            parts[part] = write_answer_files(kind, shards, out_dir, part=part, settings=settings, written=written)
        else:
            parts[part] = write_windows(
                shards, out_dir, part=part, settings=settings, window=window, key=key, threads=threads, written=written
            )
    return parts


def _longest(tokenized: Tokenized, settings: PackSettings, window: int | None) -> int:
    """Returns the most tokens of a row of the pack."""
    if window is None or window == settings.max_seq_len:
        return settings.max_seq_len
    return max(window, *map(longest_example, tokenized.shards.values()))


def _enforce(tally: EncodingTally, settings: PackSettings, part: Part) -> None:
    """Refuses rows that the training file's policies do not allow, naming the first ones."""
    unfit = settings.bad_rows == "fail"
    misfit = (unfit, "do not fit the base model", "correct them, choose another base model, or upload with the policy bad_rows=drop")
    refused = {
        "control_token_in_content": (
            settings.control_tokens == "reject" or (unfit and settings.control_tokens == "escape"),
            "hold a control token of the base model",
            "correct them, or upload the training file with the policy 'drop' (or 'escape' for control tokens)",
        ),
        "example_too_long": (
            settings.over_long == "reject",
            f"are over {settings.max_seq_len} tokens",
            "correct them, or upload the training file with the policy 'drop'",
        ),
        **dict.fromkeys(
            ("template_refused", "template_unstable", "reasoning_not_rendered", "tools_not_rendered", "answer_not_rendered"), misfit
        ),
    }
    for code, (refuse, what, fix) in refused.items():
        if refuse and (count := tally.dropped.get(code)):
            rows = ", ".join(map(str, tally.dropped_rows[code]))
            where = "" if part == "train" else " of the validation part"
            reason = f": {tally.reasons[code]}" if code in tally.reasons else ""
            raise InvalidDataset(f"{count} examples{where} {what} (rows {rows}){reason}; {fix}", code=code)


def _nothing_left(tally: EncodingTally, settings: PackSettings) -> InvalidDataset:
    """Returns the refusal of a pack without training rows, with its most frequent cause."""
    if (cut := tally.dropped.get("answer_cut_off", 0)) and cut == max(tally.dropped.values()):
        rows = ", ".join(map(str, tally.dropped_rows["answer_cut_off"]))
        message = f"max_seq_len {settings.max_seq_len} cuts off the whole answer of {cut} rows (rows {rows}), and no other row is left"
        return InvalidDataset(f"{message} to train on; raise max_seq_len, or shorten the prompts", code="answer_cut_off")
    message = f"no example is left to train on: {_spell(tally)}; lower validation_fraction or correct the rows"
    return InvalidDataset(message, code="too_few_examples")


def _spell(tally: EncodingTally) -> str:
    return ", ".join(f"{count} x {code}" for code, count in tally.dropped.items()) or "every example is in the validation part"
