"""Computes the reference log-probabilities of a pack of pairs or judged answers, file by file; reuses complete files of an earlier attempt.

A training does this first, on its own GPUs, unless they are stored already. The reference is the model that training starts from: the base,
quantized as for training, with the adapter of a warm start on it, or the whole model of one in its place. For each answer: the sum of the
log-probabilities of the tokens that carry loss, like TRL's ``precompute_ref_log_probs``. torch is imported only if something is missing.

Each rank has the whole model on its GPU. If a GPU does not hold it, as may happen to a training that shards it, one rank of several
spreads it over the GPUs of all of them (:mod:`.model.split_weights`).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from core.durable_files import sha256_of
from engine.data import verify_pack as verify_pack
from engine.training import model_shapes
from engine.training.memory import forward_pass
from engine.training.pack_stream import ARRIVING
from engine.training.reference_logps import (
    ATTENTION,
    REFERENCE_MANIFEST,
    SIDES,
    ReferenceFile,
    ReferenceManifest,
    files_of_pack,
    joined_fingerprint,
    partial_name,
    quantization_label,
    reference_key,
    remove_partial,
    usable_files,
    write_logps,
)
from engine.training.runtime.pack_loader import values_and_offsets
from engine.training.runtime.run_errors import BadInput, BadSpec
from engine.training.spec import Quantization, RunFile

log = logging.getLogger(__name__)

DIRECTORY = "reference"
"""Where a training's work directory holds them."""
POLL_S = 0.2
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
BATCH_TOKENS = 16_384
"""Tokens per batch, including padding: hidden states of an 8B model take 130 MB per layer. Halved when memory runs out."""


def compute_for(run: RunFile, *, touch: Callable[[], None]) -> Path:
    """Computes what a training needs, each rank of a node its share of the files, and returns their directory; calls `touch` meanwhile.

    Every file of the pack is scored, so all of them are waited for.
    """
    spec, directory = run.spec, run.work_dir / DIRECTORY
    while (run.pack_dir / ARRIVING).exists():
        touch()
        time.sleep(POLL_S)
    found = compute(
        run.pack_dir,
        run.base_model_dir,
        directory,
        base_digest=spec.base_digest,
        precision=spec.precision,
        attention=ATTENTION,
        quantization=spec.quantization,
        start_dir=run.warm_start_dir,
        directories=[directory for _, directory in spec.packs],
        sharded=spec.strategy in ("fsdp2", "zero3") and spec.quantization is None,
        rank=int(os.environ.get("LOCAL_RANK", "0")),
        num_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        touch=touch,
    )
    if found.key != spec.reference:
        raise BadInput(f"the reference log-probabilities of these files have key {found.key}, but the spec requires {spec.reference}")
    return directory


def compute(
    pack_dir: Path,
    base_dir: Path,
    out_dir: Path,
    *,
    base_digest: str,
    precision: str,
    attention: str,
    quantization: Quantization | None = None,
    start_dir: Path | None = None,
    batch_tokens: int = BATCH_TOKENS,
    sharded: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
    directories: Sequence[str] = ("",),
    touch: Callable[[], None] = lambda: None,
) -> ReferenceManifest:
    """Computes the missing log-probabilities in `out_dir` and returns them; a second call computes nothing.

    Ranks that share `out_dir` divide the pack's files among themselves, and all return once every file is there. `start_dir`: the adapter
    on the base, or the whole model in its place, that training starts from. `sharded`: the model may be too large for one GPU.
    `directories`: of the packs in `pack_dir`.
    """
    packs = [verify_pack(pack_dir / directory) for directory in directories]
    kind, fingerprint = packs[0].kind, joined_fingerprint([pack.fingerprint for pack in packs])
    for pack in packs:
        if pack.kind not in SIDES:
            raise BadSpec(f"{pack_dir} is a pack of {pack.kind}; reference log-probabilities require answers: build a preference pack")
    whole_dir = None if start_dir is None or (start_dir / ADAPTER_FILES[0]).is_file() else start_dir
    adapter = None if start_dir is None else _manifest_digest(start_dir, ADAPTER_FILES if whole_dir is None else ())
    key = reference_key(fingerprint, base_digest, precision, attention, quantization=quantization, adapter=adapter)
    out_dir.mkdir(parents=True, exist_ok=True)
    done = {entry.of: entry for entry in usable_files(out_dir, key)}
    wanted = [
        name
        for pack, directory in zip(packs, directories, strict=True)
        for part in (pack.shards, pack.validation["shards"] if pack.validation else ())
        for name in files_of_pack(directory, [str(shard["name"]) for shard in part], mixed=len(packs) > 1)
    ]
    manifest = ReferenceManifest(
        key=key,
        pack_fingerprint=fingerprint,
        base_digest=base_digest,
        precision=precision,
        attention=attention,
        kind=kind,
        quantization=quantization_label(quantization),
        adapter=adapter,
        files=(),
    )
    width = gpus_of_a_copy(base_dir, precision, num_ranks) if sharded and len(done) < len(wanted) else 1
    own = [name for name in share(wanted, rank, num_ranks, width) if name not in done]
    num_found = len(done)
    if own:
        model = Model(
            whole_dir or base_dir,
            precision=precision,
            attention=attention,
            quantization=quantization,
            adapter_dir=None if whole_dir else start_dir,
            batch_tokens=batch_tokens,
            devices=_devices(rank, width),
            touch=touch,
        )
        for name in own:
            started = time.monotonic()
            path = pack_dir / name if len(packs) > 1 else pack_dir / directories[0] / name
            done[name] = _compute_file(model, path, out_dir, of=name, kind=kind)
            replace(manifest, files=tuple(done.values())).write(out_dir, name=partial_name(rank))
            log.info("%s: %d rows in %.1f s", name, done[name].num_rows, time.monotonic() - started)
        model.close()
    log.info("%s: %d files computed, %d found", key, len(own), num_found)
    while len(done := {entry.of: entry for entry in usable_files(out_dir, key)}) < len(wanted):
        touch()
        time.sleep(POLL_S)
    whole = replace(manifest, files=tuple(done[name] for name in wanted))
    if rank == 0:
        whole.write(out_dir)
        remove_partial(out_dir)
    return whole


def share(names: Sequence[str], rank: int, num_ranks: int, width: int) -> Sequence[str]:
    """Returns what one rank computes if the first of each `width` ranks has a copy of the model: nothing for the others.

    It depends on nothing that ranks see at different times, so that nothing is left out.
    """
    copy, place = divmod(rank, width)
    num_copies = num_ranks // width
    return names[copy::num_copies] if place == 0 and copy < num_copies else ()


def gpus_of_a_copy(base_dir: Path, precision: str, num_ranks: int) -> int:
    """Returns over how many GPUs of this node the model is spread; at most those of its ranks."""
    import torch

    if not torch.cuda.is_available():
        return 1
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    shape = model_shapes.shape_of("", directory=base_dir)
    return min(num_ranks, forward_pass.forward_pass_gpus(shape, memory_bytes, compute_bytes=4 if precision == "fp32" else 2) or num_ranks)


def _devices(rank: int, width: int) -> list[Any]:
    import torch

    return [torch.device("cuda", rank + i) for i in range(width)] if torch.cuda.is_available() else [torch.device("cpu")]


def _manifest_digest(directory: Path, only: Sequence[str]) -> str:
    """Returns the digest of the manifest of an adapter or a model after verifying `only` these of its files, or all."""
    try:
        listed = json.loads((directory / REFERENCE_MANIFEST).read_bytes())["files"]
        for name in only or listed:
            if sha256_of(directory / name) != listed[name]["sha256"]:
                raise BadInput(f"{directory / name} does not match its manifest; fetch it again")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{directory} has no complete adapter or model with a manifest ({e!r}); fetch it again") from e
    return sha256_of(directory / REFERENCE_MANIFEST)


def _compute_file(model: Model, path: Path, out_dir: Path, *, of: str, kind: str) -> ReferenceFile:
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
    return write_logps(out_dir, of, {"row": rows, **columns}, kind=kind)


def _arrays(table: pa.Table, column: str) -> list[NDArray[np.int32]]:
    values, offsets = values_and_offsets(table, column)
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


class Model:
    """Loads the model that training starts from, without dropout and gradients; over several `devices` unless it is quantized."""

    def __init__(
        self,
        directory: Path,
        *,
        precision: str,
        attention: str,
        quantization: Quantization | None,
        adapter_dir: Path | None,
        batch_tokens: int,
        devices: Sequence[Any],
        touch: Callable[[], None],
    ) -> None:
        import torch
        import transformers
        from trl.trainer.utils import add_fused_lm_head

        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self._torch = torch
        self._devices, self._device = devices, devices[0]
        self._batch_tokens, self._touch = batch_tokens, touch
        loaded = self._load(directory, precision=precision, attention=attention, quantization=quantization)
        if adapter_dir is not None:
            loaded = _with_adapter(loaded, adapter_dir)
        add_fused_lm_head(loaded)  # scores the labels in tiles, without logits of the whole batch
        self._model = loaded.eval()
        self._vocab_size = int(loaded.get_input_embeddings().num_embeddings)

    def close(self) -> None:
        """Gives the memory back, which the training needs next."""
        del self._model
        gc.collect()
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _load(self, directory: Path, *, precision: str, attention: str, quantization: Quantization | None) -> Any:
        from engine.training.runtime.model import split_weights

        torch = self._torch
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        options: dict[str, Any] = {}
        if quantization is not None:
            from engine.training.runtime.model.weights import keep_layout, quantized

            options = quantized(quantization, dtype=dtype, device=self._device)
        if split := len(self._devices) > 1:
            options = split_weights.options(self._devices)
        from transformers import AutoConfig

        from engine.training.runtime.model import decoder
        from engine.training.runtime.model.attention import chosen

        try:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            kernel = chosen(attention, self._device, config, precision=precision, packed=False).kernel
            loaded: Any = decoder.load(directory, dtype=dtype, attn_implementation=kernel, **options)
        except (OSError, ValueError, ImportError) as e:
            raise BadInput(f"base model in {directory} cannot be loaded: {e}", code="base_model_unavailable") from e
        if split:
            split_weights.check(loaded)
            return loaded
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
            self._touch()
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
