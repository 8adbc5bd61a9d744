"""The model under evaluation: the base, with adapters switched on and off, or a whole model in its place.

It answers requests in batches, and yields the answers of each batch by id of the request. The composition of batches depends on all
requests, never on those that are left (`skip`), so a continued run gets the same answers.
"""

from __future__ import annotations

import errno
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig

from core.errors import InvalidRequest
from engine.data import ChatTokenizer
from engine.evals.run import prefix_tree
from engine.evals.run.replicas import Part
from engine.evals.run.request_encoder import Encoder, Prompt, batches, end_tokens, positions, text_of
from engine.evals.run.tree_attention import Reader
from engine.evals.suites.model_requests import Answer, Generate, Likelihood, Loss, Request
from engine.training.runtime.model import decoder, split_weights

NLL_CAP = 1e4
"""Replaces a loss per token that is not finite: keeps the result valid JSON, and the adapter last in any comparison."""
PROOF_TOKENS = 16
"""Last tokens of a prompt whose logits are compared: enough to distinguish models at any vocabulary size."""
CPU_LOGIT_BYTES, GPU_LOGIT_BYTES = 1 << 30, 8 << 30
"""Most memory for the logits of one batch, including the copies that a softmax makes."""
CPU_BATCH, GPU_BATCH = 32, 128
"""Prompts generated together. On an H100 a token of an 8B model takes as long for 128 of them (88 ms) as for 32
(benchmarks/gpu_h100_202611.json); a batch that does not fit is halved."""
COPIES_OF_LOGITS = 3
SLICE_BYTES = 1 << 28
"""Most memory for the float32 copies of logits of examples, whose logits in the model's own precision are held at once."""
ADAPTER_CONFIG = "adapter_config.json"
"""Files of an adapter's directory that a whole model does not have."""

LIBRARIES = ("torch", "transformers", "peft")
"""Libraries whose versions affect answers: kernels, attention, how adapters are applied."""
UNREADABLE = (ValueError, RuntimeError, KeyError, OSError, TypeError, SafetensorError)
"""Errors of loading files that are damaged, or are not a model or adapter of this base."""
ACCELERATOR_ERRORS = ("CUDA error:", "CUDA driver error:", "cuDNN error:", "HIP error:")
"""How PyTorch's messages begin where it raises a plain ``RuntimeError`` for a fault of the accelerator."""

Batch = dict[str, Answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference between the logits of a subject and the base's, on the last tokens of some prompts."""

    largest: float
    num_prompts: int
    num_different: int
    """Number of prompts with any difference."""


class Subject:
    """A loaded model that answers requests; :meth:`applied` switches on what is judged besides the base.

    Adapters share the base. A whole model replaces it in memory, which holds only one.
    """

    def __init__(
        self,
        base_model_dir: Path,
        *,
        batch_size: int | None = None,
        gpus: Sequence[torch.device] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`batch_size`: None for what suits the device. `gpus` hold the model, if it is on several in whole layers; None: all that the
        process sees, or the CPU if it sees none. `on_step` is called for every step of generation."""
        self._gpus = gpus if gpus is not None else [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        self.num_gpus = len(self._gpus)
        self._device = self._gpus[0] if self._gpus else torch.device("cpu")
        self._dtype = torch.bfloat16 if self._gpus else torch.float32
        self._logit_bytes = GPU_LOGIT_BYTES if self._gpus else CPU_LOGIT_BYTES
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base_model_dir, trust_remote_code=False)
        self._base_dir, self._directories = base_model_dir, dict[str, Path]()
        self._batch_size = batch_size or (GPU_BATCH if self._gpus else CPU_BATCH)
        self._on_step = on_step
        self._ends: list[int] = []
        self._load(base_model_dir)
        self._pad = next(i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0) if i is not None)
        context = positions(self.model.config.get_text_config(decoder=True), self.tokenizer)
        self.encoder = Encoder(self.tokenizer, chat=ChatTokenizer.load(base_model_dir), context=context)

    @property
    def environment(self) -> str:
        """Settings that affect answers besides model and question: part of the key under which they are kept.

        Includes the batch size where arithmetic is coarse enough that the other prompts of a batch can change an answer.
        """
        device = torch.get_device_module(self._device).get_device_name(self._device) if self._gpus else "cpu"
        parts = [f"{self.num_gpus} x {device}" if self.num_gpus > 1 else device, str(self._dtype).removeprefix("torch.")]
        parts += [f"{name} {'.'.join(metadata.version(name).split('.')[:2])}" for name in LIBRARIES]
        parts += [f"batches of {self._batch_size}"] if self._dtype != torch.float32 else []
        return ", ".join(parts).replace("@", " ").replace("+", " ")

    def add(self, name: str, directory: Path) -> None:
        """Adds what may be applied as `name`: an adapter of the base, or a whole model."""
        self._directories[name] = directory
        if not self._is_whole(name):
            self._attach(name)

    @contextmanager
    def applied(self, name: str | None) -> Iterator[None]:
        """Context with `name` applied: an adapter merged if that is exact to 1e-5 (fp32), otherwise beside the weights; a whole model as it
        is.

        None: only the base.
        """
        if name is None or self._is_whole(name):
            self._load(self._base_dir if name is None else self._directories[name])
            yield
            return
        self._attach(name)
        self.model.set_adapter(name)
        self._active = True
        try:
            with self._merged(name) if self._dtype == torch.float32 else nullcontext():
                yield
        finally:
            self._active = False

    def answer(self, requests: Sequence[Request], *, skip: Collection[str] = (), part: Part | None = None) -> Iterator[Batch]:
        """Yields answers to any kind of request, of the batches in `part`; those whose answers are all in `skip` are left out."""
        part = part or Part()
        kinds: tuple[tuple[type, Callable[..., Iterator[Batch]]], ...] = (
            (Generate, self._generate), (Likelihood, self._likelihood), (Loss, self._loss),
        )  # fmt: skip
        for kind, answered in kinds:
            if requested := [r for r in requests if isinstance(r, kind)]:
                yield from answered(requested, skip=skip, part=part)

    @torch.no_grad()
    def _generate(self, requests: Sequence[Generate], *, skip: Collection[str], part: Part) -> Iterator[Batch]:
        """Yields greedy answers."""
        for stops, budget, batch in batches(requests, self.encoder, size=self._batch_size):
            if part.has_next() and _missing([request.id for request, _ in batch], skip):
                yield from self._in_memory(batch, partial(self._generated, stops=stops, budget=budget))

    @torch.no_grad()
    def _likelihood(self, requests: Sequence[Likelihood], *, skip: Collection[str], part: Part) -> Iterator[Batch]:
        """Yields log-probabilities of continuations; common parts of contexts are read once (see :mod:`.prefix_tree`)."""
        contexts: dict[str, list[Likelihood]] = {}
        for request in requests:
            contexts.setdefault(request.context, []).append(request)
        nothing: Batch = {r.id: [0.0, 1.0] for r in requests if not self.encoder.scored(r).targets}
        if nothing and part.has_next() and _missing(nothing, skip):
            yield nothing
        trees = [
            prefix_tree.tree([(r.id, self.encoder.scored(r)) for r in group])
            for requested in contexts.values()
            for group in prefix_tree.bounded([r for r in requested if r.id not in nothing])
        ]
        reader = self._reader()
        trees = trees if reader.shares(trees) else [alone for t in trees for alone in prefix_tree.split_tree(t)]
        families = (
            prefix_tree.families(trees) if reader.shares(trees) else [prefix_tree.Family(prefix=0, trees=(*prefix_tree.by_length(trees),))]
        )
        for family in families:
            prefix: Any = None
            for batch in self._tree_batches(family):
                if not part.has_next() or not _missing([leaf.id for one in batch for leaf in one.leaves], skip):
                    continue
                prefix = reader.prefix(family) if prefix is None and family.prefix else prefix
                yield from self._in_memory(batch, partial(reader.read, prefix=prefix, num_prefix=family.prefix))

    @torch.no_grad()
    def _loss(self, requests: Sequence[Loss], *, skip: Collection[str], part: Part) -> Iterator[Batch]:
        """Yields the negative log-likelihood and the number of labeled tokens of each example."""
        ordered = sorted(requests, key=lambda r: len(r.input_ids))
        space = max(1, self._logit_bytes // (COPIES_OF_LOGITS * 4 * self._vocabulary()))
        at = 0
        while at < len(ordered):
            batch = ordered[at : at + self._batch_size]
            batch = batch[: max(1, next((n for n, r in enumerate(batch) if (n + 1) * len(r.input_ids) > space), len(batch)))]
            at += len(batch)
            if part.has_next() and _missing([r.id for r in batch], skip):
                yield from self._in_memory(batch, self._losses)

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Returns the logits of the last tokens of each prompt, which :meth:`difference` compares."""
        found = []
        for ids in prompts:
            kept = min(len(ids), PROOF_TOKENS)
            row = torch.tensor([list(ids)], device=self._device)
            found.append(self._forward(input_ids=row, use_cache=False, kept=kept).logits[0, -kept:].float().cpu())
        return found

    def difference(self, prompts: Sequence[Sequence[int]], base: Sequence[Any]) -> Difference:
        """Returns the difference of the applied subject from `base`, the base's logits on the same prompts."""
        each = [float((a - b).abs().max().nan_to_num(nan=math.inf)) for a, b in zip(self.logits(prompts), base, strict=True)]
        return Difference(largest=max(each, default=0.0), num_prompts=len(each), num_different=sum(d > 0.0 for d in each))

    def _is_whole(self, name: str) -> bool:
        return not (self._directories[name] / ADAPTER_CONFIG).is_file()

    def _load(self, directory: Path) -> None:
        """Loads the bare model of `directory` in place of the current one."""
        if getattr(self, "_loaded", None) == directory:
            return
        if getattr(self, "model", None) is not None:
            torch.nn.Module.to(self.model, "meta")  # frees its weights, though modules refer to each other in cycles
        self.model: Any = None
        load: Any = partial(decoder.load, output_loading_info=True)
        split = split_weights.options(self._gpus) if self.num_gpus > 1 else {}
        try:
            model, found = load(directory, dtype=self._dtype, **split)
        except UNREADABLE as e:
            if directory == self._base_dir or _is_the_machines(e):
                raise
            raise InvalidRequest(f"the model in {directory} cannot be loaded: {e}", code="adapter_unloadable") from e
        if directory != self._base_dir and (absent := [*found["missing_keys"], *found["mismatched_keys"]]):
            raise InvalidRequest(f"the model in {directory} lacks {absent[0]}, or it has another shape", code="adapter_unloadable")
        self._ends = self._ends or end_tokens(model.generation_config.eos_token_id, self.tokenizer)
        model.generation_config = _decoding()  # its own may hold penalties, banned words, minimum lengths: none applies here
        if split:
            split_weights.check(model)
        self.model = (model if split else model.to(self._device)).eval()
        self._loaded, self._attached, self._active = directory, set[str](), False

    def _attach(self, name: str) -> None:
        """Loads the base, and the adapter `name` beside it."""
        self._load(self._base_dir)
        if name in self._attached:
            return
        directory = self._directories[name]
        try:
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(str(directory), adapter_name=name)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(directory), adapter_name=name)
        except UNREADABLE as e:
            if _is_the_machines(e):
                raise
            raise InvalidRequest(f"adapter {directory} does not fit the base model: {e}", code="adapter_unloadable") from e
        self._attached.add(name)
        self.model.eval()

    @contextmanager
    def _merged(self, name: str) -> Iterator[None]:
        self.model.merge_adapter([name])
        try:
            yield
        finally:
            self.model.unmerge_adapter()

    @torch.no_grad()
    def _forward(self, *, kept: Any = 0, **inputs: Any) -> Any:
        """Runs one pass of the base or of what is applied; returns logits of the last `kept` tokens or of those positions, if the model
        supports it."""
        bare = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        if self.num_gpus > 1 and isinstance(kept, torch.Tensor):
            kept = kept.tolist()  # a tensor would be moved to the first GPU, and the last one has what it indexes
        some = {"logits_to_keep": kept} if "logits_to_keep" in inspect.signature(bare.forward).parameters else {}
        with self._switched():
            return self.model(**inputs, **some)

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Adapters do not affect an answer unless one is applied."""
        with self.model.disable_adapter() if self._attached and not self._active else nullcontext():
            yield

    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _reader(self) -> Reader:
        config = self.model.config.get_text_config(decoder=True)
        return Reader(self._forward, config, device=self._device, dtype=self._dtype, pad=self._pad)

    def _tree_batches(self, family: prefix_tree.Family) -> Iterator[list[prefix_tree.Tree]]:
        """Yields trees of a family that are read together: as many as the batch size, the positions and the logits allow."""
        rows = self._logit_bytes // (COPIES_OF_LOGITS * 4 * self._vocabulary())
        batch: list[prefix_tree.Tree] = []
        for one in family.trees:
            more = [*batch, one]
            wide = len(more) * max(len(t.ids) - family.prefix for t in more) > self._batch_size * self.encoder.context
            if batch and (len(batch) == self._batch_size or wide or len(more) * len(prefix_tree.places(more)) > rows):
                yield batch
                more = [one]
            batch = more
        yield batch

    def _in_memory(self, batch: Sequence[Any], answered: Callable[[Sequence[Any]], Batch]) -> Iterator[Batch]:
        """Returns the answers of a batch, in halves if it does not fit into the accelerator's memory."""
        try:
            found = answered(batch)
        except torch.cuda.OutOfMemoryError:
            if len(batch) == 1:
                raise
            found = {}
        if found:
            yield found
            return
        torch.cuda.empty_cache()
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            yield from self._in_memory(half, answered)

    def _generated(self, batch: Sequence[tuple[Generate, Prompt]], *, stops: tuple[str, ...], budget: int) -> Batch:
        width = max(len(prompt.ids) for _, prompt in batch)
        pads = [width - len(prompt.ids) for _, prompt in batch]
        padded = zip(pads, batch, strict=True)
        ids = torch.tensor([[self._pad] * pad + [*prompt.ids] for pad, (_, prompt) in padded], device=self._device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self._device)
        with self._switched():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=_decoding(
                    max_new_tokens=budget, do_sample=False, num_beams=1, eos_token_id=self._ends, pad_token_id=self._pad
                ),
                stopping_criteria=[self._counter, *([self._stopper(stops, width)] if stops else [])],
            )
        rows = zip(batch, out[:, width:].tolist(), strict=True)
        return {request.id: text_of(row, self.tokenizer, ends=self._ends, stops=stops) for (request, _), row in rows}

    def _counter(self, ids: Any, _scores: Any, **_: Any) -> Any:
        """Counts a step of generation; ends no row."""
        self._on_step()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def _stopper(self, stops: Sequence[str], width: int) -> Callable[..., Any]:
        """Ends a row once one of `stops` is in the last generated text; a token is at least a byte."""
        tail = max(len(stop.encode()) for stop in stops) + 1

        def met(ids: Any, _scores: Any, **_: Any) -> Any:
            texts = self.tokenizer.batch_decode(ids[:, max(width, ids.shape[1] - tail) :], skip_special_tokens=True)
            return torch.tensor([any(stop in text for stop in stops) for text in texts], device=ids.device)

        return met

    def _losses(self, batch: Sequence[Loss]) -> Batch:
        width = max(len(r.input_ids) for r in batch)
        ids = torch.tensor([[*r.input_ids] + [self._pad] * (width - len(r.input_ids)) for r in batch], device=self._device)
        labels = torch.tensor([[*r.labels] + [-100] * (width - len(r.labels)) for r in batch], device=self._device)[:, 1:]
        # Padding is on the right and attention is causal: real tokens never see it, so no mask is needed.
        logits = self._forward(input_ids=ids, use_cache=False).logits[:, :-1]
        tokens = max(1, SLICE_BYTES // (COPIES_OF_LOGITS * 4 * self._vocabulary() * len(batch)))
        slices = zip(torch.split(logits, tokens, dim=1), torch.split(labels, tokens, dim=1), strict=True)
        each = torch.cat([_cross_entropy(*one) for one in slices], dim=1)
        answers: Batch = {}
        for request, row, labelled in zip(batch, each, labels != -100, strict=True):
            num = int(labelled.sum())
            cap = NLL_CAP * max(1, num)
            answers[request.id] = [float(row.double().sum().nan_to_num(nan=cap, posinf=cap)), float(num)]
        return answers


def _cross_entropy(logits: Any, labels: Any) -> Any:
    """Returns the negative log-likelihood of each label, 0 where there is none: shape (rows, tokens)."""
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=-100)


def _decoding(**chosen: Any) -> Any:
    """Returns generation settings: as `chosen`, and otherwise the library's own defaults."""
    make: Any = GenerationConfig
    return make(**chosen)


def _missing(ids: Collection[str], skip: Collection[str]) -> bool:
    return any(id_ not in skip for id_ in ids)


def _is_the_machines(error: Exception) -> bool:
    """Returns whether loading failed for lack of memory or of a working disk or accelerator: that says nothing about the files, and another
    run may succeed."""
    if isinstance(error, OSError):
        return error.errno not in (None, errno.ENOENT)
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or str(error).startswith(ACCELERATOR_ERRORS)
