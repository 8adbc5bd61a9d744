"""Computes the reference log-probabilities of a pack of pairs or judged answers, file by file; reuses complete files of an earlier run.

    python -m ft_assets.training.runtime.reference --pack DIR --base DIR --base-digest SHA --out DIR [--precision fp32]
        [--adapter DIR] [--quantization nf4 [--single-quantization]]

The reference is the model that training starts from: the base, quantized as for training, with the adapter of a warm start on it. For each
answer: the sum of the log-probabilities of the tokens that carry loss, like TRL's ``precompute_ref_log_probs``. torch is imported only if
there is something to compute.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ft_assets.base_models import model_digest
from ft_assets.datasets.packs.manifest import verify as verify_pack
from ft_assets.durable_files import sha256_of
from ft_assets.errors import FtError
from ft_assets.parent_death import die_with
from ft_assets.training.failures import EXIT_CODES
from ft_assets.training.reference_logps import (
    MANIFEST,
    PARTIAL,
    SIDES,
    ReferenceFile,
    ReferenceManifest,
    quantization_label,
    reference_key,
    usable_files,
    write_logps,
)
from ft_assets.training.runtime.imports import go_offline
from ft_assets.training.runtime.pack_loader import values_and_offsets
from ft_assets.training.runtime.run_errors import BadInput, BadSpec, RunEnded
from ft_assets.training.spec import Quantization

log = logging.getLogger(__name__)

PRECISIONS = ("fp32", "bf16", "fp16")
ATTENTION = ("sdpa", "eager")
UNUSED = ("bitsandbytes", "deepspeed", "scipy")
"""Modules that the libraries probe for and import, which takes seconds each; not needed here."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
BATCH_TOKENS = 16_384
"""Tokens per batch, including padding: hidden states of an 8B model take 130 MB per layer. Halved when memory runs out."""


def compute(
    pack_dir: Path,
    base_dir: Path,
    out_dir: Path,
    *,
    base_digest: str,
    precision: str,
    attention: str,
    quantization: Quantization | None = None,
    adapter_dir: Path | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> ReferenceManifest:
    """Computes the missing log-probabilities in `out_dir` and returns them; a second call computes nothing."""
    pack = verify_pack(pack_dir)
    if pack.kind not in SIDES:
        raise BadSpec(f"{pack_dir} is a pack of {pack.kind}; reference log-probabilities require answers: build a preference pack")
    adapter = None if adapter_dir is None else _adapter_digest(adapter_dir)
    key = reference_key(pack.fingerprint, base_digest, precision, attention, quantization=quantization, adapter=adapter)
    out_dir.mkdir(parents=True, exist_ok=True)
    done = {entry.of: entry for entry in usable_files(out_dir, key)}
    wanted = [str(s["name"]) for s in (*pack.shards, *(pack.validation["shards"] if pack.validation else ()))]
    manifest = ReferenceManifest(
        key=key,
        pack_fingerprint=pack.fingerprint,
        base_digest=base_digest,
        precision=precision,
        attention=attention,
        kind=pack.kind,
        quantization=quantization_label(quantization),
        adapter=adapter,
        files=(),
    )
    missing = [name for name in wanted if name not in done]
    if missing:
        (out_dir / MANIFEST).unlink(missing_ok=True)
        model = Model(
            base_dir,
            precision=precision,
            attention=attention,
            quantization=quantization,
            adapter_dir=adapter_dir,
            batch_tokens=batch_tokens,
        )
    for name in missing:
        started = time.monotonic()
        done[name] = _compute_file(model, pack_dir / name, out_dir, kind=pack.kind)
        replace(manifest, files=tuple(done.values())).write(out_dir, name=PARTIAL)
        log.info("%s: %d rows in %.1f s", name, done[name].num_rows, time.monotonic() - started)
    whole = replace(manifest, files=tuple(done[name] for name in wanted))
    if missing or not (out_dir / MANIFEST).is_file():
        whole.write(out_dir)
    (out_dir / PARTIAL).unlink(missing_ok=True)
    log.info("%s: %d files computed, %d found", key, len(missing), len(wanted) - len(missing))
    return whole


def _adapter_digest(adapter_dir: Path) -> str:
    """Returns the digest of the adapter's manifest after verifying its files; optimizer states may be missing."""
    try:
        listed = json.loads((adapter_dir / MANIFEST).read_bytes())["files"]
        for name in ADAPTER_FILES:
            if sha256_of(adapter_dir / name) != listed[name]["sha256"]:
                raise BadInput(f"{adapter_dir / name} does not match its manifest; fetch the adapter again")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{adapter_dir} has no complete adapter with a manifest ({e!r}); fetch it again") from e
    return sha256_of(adapter_dir / MANIFEST)


def _compute_file(model: Model, path: Path, out_dir: Path, *, kind: str) -> ReferenceFile:
    table = pq.read_table(path)
    rows, sides = table["row"].to_numpy(), SIDES[kind]
    ids = [array for prefix in sides.values() for array in _arrays(table, f"{prefix}input_ids")]
    labels = [array for prefix in sides.values() for array in _arrays(table, f"{prefix}labels")]
    logps = model.sequence_logps(ids, labels)
    bad = ~np.isfinite(logps)
    if bad.any():
        row = int(np.tile(rows, len(sides))[int(bad.argmax())])
        raise BadInput(f"{path.name}, row {row}: the base model gives a log-probability that is not finite; use precision fp32 or bf16")
    columns = dict(zip(sides, logps.reshape(len(sides), len(rows)), strict=True))
    return write_logps(out_dir, path.name, {"row": rows, **columns}, kind=kind)


def _arrays(table: pa.Table, column: str) -> list[NDArray[np.int32]]:
    values, offsets = values_and_offsets(table, column)
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


class Model:
    """Loads the model that training starts from, without dropout and gradients."""

    def __init__(
        self,
        directory: Path,
        *,
        precision: str,
        attention: str,
        quantization: Quantization | None,
        adapter_dir: Path | None,
        batch_tokens: int,
    ) -> None:
        go_offline(unused=UNUSED if quantization is None else ())
        import torch
        import transformers
        from trl.trainer.utils import add_fused_lm_head

        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self._torch = torch
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._batch_tokens = batch_tokens
        loaded = self._load(directory, precision=precision, attention=attention, quantization=quantization)
        if adapter_dir is not None:
            loaded = _with_adapter(loaded, adapter_dir)
        add_fused_lm_head(loaded)  # scores the labels in tiles, without logits of the whole batch
        self._model = loaded.eval()
        self._vocab_size = int(loaded.get_input_embeddings().num_embeddings)

    def _load(self, directory: Path, *, precision: str, attention: str, quantization: Quantization | None) -> Any:
        torch = self._torch
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        options: dict[str, Any] = {}
        if quantization is not None:
            from ft_assets.training.runtime.model.weights import keep_layout, quantized

            options = quantized(quantization, dtype=dtype, device=self._device)
        import transformers

        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, use_safetensors=True, trust_remote_code=False, attn_implementation=attention, **options
            )
        except (OSError, ValueError, ImportError) as e:
            raise BadInput(f"base model in {directory} cannot be loaded: {e}", code="base_model_unavailable") from e
        if not options:
            return loaded.to(self._device)
        keep_layout(loaded)
        return loaded

    def sequence_logps(self, ids: Sequence[NDArray[np.int32]], labels: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Returns the sum of the log-probabilities of the labels of each sequence, in batches of similar length, longest first.

        A batch that exceeds memory is halved, and so are later ones.
        """
        highest = max(int(i.max()) for i in ids)
        if highest >= self._vocab_size:
            raise BadInput(
                f"the pack holds token {highest}, the base model's vocabulary ends at {self._vocab_size - 1}; build the pack again"
            )
        out = np.empty(len(ids), np.float32)
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        while order:
            batch = order[: max(1, self._batch_tokens // len(ids[order[0]]))]
            try:
                out[batch] = self._forward([ids[i] for i in batch], [labels[i] for i in batch])
            except self._torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                self._batch_tokens = len(ids[order[0]]) * (len(batch) // 2)
                self._torch.cuda.empty_cache()
                log.info("out of memory; batches reduced to %d tokens", self._batch_tokens)
                continue
            order = order[len(batch) :]
        return out

    def _forward(self, ids: Sequence[NDArray[np.int32]], labels: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        torch = self._torch
        shape = (len(ids), max(len(i) for i in ids))
        batch = {"input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": torch.zeros(shape, dtype=torch.long)}
        batch["labels"] = torch.full(shape, -100)
        for row, (i, lab) in enumerate(zip(ids, labels, strict=True)):
            batch["input_ids"][row, : len(i)] = torch.from_numpy(i.copy())
            batch["attention_mask"][row, : len(i)] = 1
            batch["labels"][row, : len(i)] = torch.from_numpy(lab.copy())
        with torch.inference_mode():
            found = self._model(**{k: v.to(self._device) for k, v in batch.items()}, use_cache=False, fused_lm_head=True).log_probs
            result: NDArray[np.float32] = found.double().sum(dim=1).float().cpu().numpy()
        return result


def _with_adapter(base: Any, directory: Path) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, str(directory)).get_base_model()
    except (OSError, ValueError, RuntimeError) as e:
        raise BadInput(f"the adapter in {directory} cannot be put on the base model: {str(e)[:300]}") from e


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s")
    if options.die_with_parent is not None and not die_with(options.die_with_parent):
        return 1
    try:
        compute(
            options.pack,
            options.base,
            options.out,
            base_digest=options.base_digest or model_digest(options.base),
            precision=options.precision,
            attention=options.attention,
            quantization=options.quantization and Quantization(kind=options.quantization, double=not options.single_quantization),
            adapter_dir=options.adapter,
            batch_tokens=options.batch_tokens,
        )
    except RunEnded as e:
        log.error("%s", e.message)
        return EXIT_CODES[e.outcome]
    except FtError as e:
        log.error("%s", json.dumps(e.to_dict()))
        return EXIT_CODES[BadInput.outcome]
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ft_assets.training.runtime.reference", description=__doc__.split("\n")[0] if __doc__ else None
    )
    for name in ("pack", "base", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--base-digest", help="digest of the base model; default: computed from its files")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--attention", choices=ATTENTION, default="sdpa")
    parser.add_argument("--quantization", choices=("nf4", "fp4"), help="4-bit type of the base; default: not quantized")
    parser.add_argument("--single-quantization", action="store_true", help="do not quantize the quantization constants")
    parser.add_argument("--adapter", type=Path, help="directory of the adapter that training starts from, with its manifest")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent process does")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
