"""Preference methods on several files: each step and validation knows the loss of each file, and a stop changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.data.packs.build import PackSettings, build_judged_pack, build_preference_pack  # noqa: E402
from engine.data.tokens.chat_tokenizer import ChatTokenizer  # noqa: E402
from engine.training import methods, reference_logps  # noqa: E402
from engine.training.runtime import pack_loader, reference  # noqa: E402
from engine.training.runtime.run_errors import BadInput  # noqa: E402
from engine.training.spec import LoraSettings, RunFile, Source  # noqa: E402
from tests.engine.training.attempts import SPEC  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.engine.training.runtime.objectives.preference_runs import (  # noqa: E402
    MAX_SEQ_LEN,
    METHODS,
    VOCAB,
    answers,
    objective_of,
    stirred,
)
from tests.engine.training.runtime.objectives.test_preference_attempts import train  # noqa: E402
from tests.engine.training.runtime.parallel.test_torchrun import torchrun  # noqa: E402
from tests.support.models.deterministic_torch import deterministic_only_here  # noqa: E402, F401
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too

PER_EPOCH = (10, 6)
BUILD = {"pairs": build_preference_pack, "judged": build_judged_pack}


class Mixed:
    """A base model, and two packs of each kind with a reference for both."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, build_tiny_model(root / "base")
        tokenizer = ChatTokenizer.load(self.base)
        settings = PackSettings(max_seq_len=MAX_SEQ_LEN, validation_fraction=0.25, file_tokens=10 * MAX_SEQ_LEN)
        self.sources: dict[str, tuple[Source, ...]] = {}
        for kind, build in BUILD.items():
            made = []
            for name, count in (("large", 24), ("small", 12)):
                manifest = build(answers(count, kind), tokenizer, settings, root / name, dataset_id=f"ds_{name}")
                (root / name).rename(self.packs(kind) / manifest.fingerprint)
                made.append(manifest)
            self.sources[kind] = tuple(
                Source(dataset_id=m.dataset_id, pack_fingerprint=m.fingerprint, rows_per_epoch=rows)
                for m, rows in zip(made, PER_EPOCH, strict=True)
            )

    def packs(self, kind: str) -> Path:
        directory = self.root / f"packs-{kind}"
        directory.mkdir(exist_ok=True)
        return directory

    def run(self, method: str, work: Path, **changes: Any) -> RunFile:
        known = methods.method_named(method)
        sources, pack_dir = self.sources[known.pack], self.packs(known.pack)
        spec = replace(
            SPEC,
            method=method,
            method_settings={name: s.default for name, s in known.settings.items()},
            lora=LoraSettings(rank=4, alpha=8, dropout=0.1),
            pack_fingerprint=sources[0].pack_fingerprint,
            dataset_id=sources[0].dataset_id,
            sources=sources,
            max_seq_len=MAX_SEQ_LEN,
            optimization=replace(SPEC.optimization, per_device_batch_size=2, num_epochs=2),
            **changes,
        )
        run = RunFile(spec=spec, base_model_dir=self.base, pack_dir=pack_dir, work_dir=work)
        if not known.needs_reference:
            return run
        run = replace(run, spec=replace(spec, reference=reference_logps.reference_key_for(spec)))
        return replace(run, reference_dir=reference.compute_for(run, touch=lambda: None))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return Mixed(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_each_file_is_that_of_its_rows_alone(mixed: Mixed, tmp_path: Path, method: str) -> None:
    objective = stirred(objective_of(mixed.run(method, tmp_path)))
    objective.model.eval()
    first_of_small = next(row for row in range(100) if objective._pack_of(row))
    rows = [0, first_of_small, 1, first_of_small + 1, 2]
    whole = objective.collate(rows)
    objective.prepare_step(objective.model, [whole])
    share = objective.loss(objective.model, whole, total_weight=objective.weight(whole))
    found = objective.metrics()
    assert (found["num_rows/ds_large"], found["num_rows/ds_small"]) == (3, 2)
    assert (3 * found["loss/ds_large"] + 2 * found["loss/ds_small"]) / 5 == pytest.approx(float(share), rel=1e-5)
    for name, own in (("ds_large", [0, 1, 2]), ("ds_small", rows[1:4:2])):
        part = objective.collate(own)
        alone = objective.loss(objective.model, part, total_weight=objective.weight(part))
        assert found[f"loss/{name}"] == pytest.approx(float(alone), rel=1e-4), "by the distance that KTO measured for the whole step"
    assert found["loss/ds_large"] != pytest.approx(found["loss/ds_small"], rel=1e-4)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_run_reports_the_loss_of_each_file_and_a_stop_changes_nothing(mixed: Mixed, tmp_path: Path, method: str) -> None:
    whole = Training(run_file=mixed.run(method, tmp_path / "whole"))
    assert whole.attempt()
    steps = [line for line in whole.lines() if "loss" in line]
    assert len(steps) == sum(PER_EPOCH) * 2 // 4
    read = dict.fromkeys(("ds_large", "ds_small"), 0)
    for step in steps:
        counts = {id_: step.get(f"num_rows/{id_}", 0) for id_ in read}
        assert sum(counts.values()) == 4
        assert sum(step[f"loss/{id_}"] * n for id_, n in counts.items() if n) / 4 == pytest.approx(step["loss"], rel=1e-5)
        read = {id_: read[id_] + n for id_, n in counts.items()}
    assert tuple(read.values()) == tuple(2 * rows for rows in PER_EPOCH)
    validations = [line for line in whole.lines() if "eval_loss" in line]
    for line in validations:
        of = [line[f"eval_loss/{id_}"] for id_ in read]
        weighed = sum(loss * rows for loss, rows in zip(of, PER_EPOCH, strict=True)) / sum(PER_EPOCH)
        assert line["eval_loss"] == pytest.approx(weighed, rel=1e-6)
    assert validations[-1]["eval_loss/ds_large"] != validations[-1]["eval_loss/ds_small"]
    stopped = Training(run_file=replace(whole.run_file, work_dir=tmp_path / "stopped"))
    assert not stopped.attempt(stop_at_poll=25)
    assert stopped.attempt() and stopped.details[-1]["resumed_from"] is not None
    assert (stopped.trajectory(), stopped.final()) == (whole.trajectory(), whole.final())


def test_a_reference_of_a_mixture_names_the_packs_of_its_files(mixed: Mixed, tmp_path: Path) -> None:
    run = mixed.run("dpo", tmp_path)
    assert run.reference_dir is not None
    manifest = reference_logps.verify(run.reference_dir)
    fingerprints = [source.pack_fingerprint for source in run.spec.sources]
    assert manifest.pack_fingerprint == "+".join(fingerprints)
    assert {entry.of.partition("/")[0] for entry in manifest.files} == set(fingerprints)
    turned = replace(run.spec, sources=run.spec.sources[::-1], pack_fingerprint=fingerprints[1])
    assert reference_logps.reference_key_for(turned) != run.spec.reference, "its rows are in another order"
    pack = pack_loader.load(run.pack_dir, run.spec, vocab_size=VOCAB)
    from engine.training.runtime.objectives import reference_reader

    of_train, held_out = reference_reader.load(run, pack, pack.train.whole())
    assert held_out is not None and pack.validation is not None
    assert (of_train.num_rows, held_out.num_rows) == (pack.train.num_rows, pack.validation.num_rows)
    with pytest.raises(BadInput, match="have pack"):
        reference_reader.load(replace(run, spec=replace(run.spec, sources=turned.sources)), pack, pack.train.whole())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_ranks_whose_rows_are_of_different_files_report_what_one_rank_does(mixed: Mixed, tmp_path: Path, method: str) -> None:
    """Every rank of a sharded model makes the same passes, whatever the files of its rows; together they compute the reference."""
    run = mixed.run(method, tmp_path / "one")
    run = replace(run, spec=replace(run.spec, lora=LoraSettings(rank=4, alpha=8, dropout=0.0)))
    opt = replace(run.spec.optimization, accumulation_steps=1)
    shared = replace(run.spec, world_size=2, strategy="fsdp2", optimization=opt)
    alone = train(run)
    together = train(replace(run, spec=shared, work_dir=tmp_path / "two", reference_dir=None), module=torchrun(2))
    assert any("loss/ds_small" in step and "loss/ds_large" in step for step in alone)
    for mine, theirs in zip(alone, together, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
