"""SFT and CPT: cross entropy over packed windows.

TRL's ``SFTTrainer`` prepares the model; the loss is its ``nll``, the mean over the step's labeled tokens, computed at those tokens alone
(``token_logps.py``). Windows of a micro-batch are rows of the batch; attention restarts at each example by its ``position_ids``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from numpy.typing import NDArray
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from engine.training.model_shapes import max_packed_len
from engine.training.runtime.collectives import reduce_sum
from engine.training.runtime.model import attention, decoder
from engine.training.runtime.model.embedding_noise import EmbeddingNoise, example_lengths
from engine.training.runtime.model.weights import hold_trained_in_fp32, lora_config
from engine.training.runtime.objectives import Batch, Ingredients, LossBySource, blame, moved, quiet, token_logps
from engine.training.runtime.pack_loader import Shards, values_and_offsets
from engine.training.runtime.run_errors import PackingRefused
from engine.training.runtime.self_test import Window, check_packing, choose_windows, plain_loss

SELF_TEST_WINDOWS = 2
MAX_SELF_TEST_SEARCH = 64
"""Windows of each pack that are searched for ones with several examples."""
MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "is_token")
PREPARED = 8
"""Windows passed to TRL's trainer, which reads only their columns."""


class Unmoved(SFTTrainer):  # type: ignore[misc]
    """Leaves the model where it was loaded: moving it copies every weight, and the strategy places it."""

    def _move_model_to_device(self, *_: Any) -> None:
        return None


def build(given: Ingredients) -> Tokens:
    token_logps.install(given.base)
    trainer = Unmoved(
        given.base,
        args=SFTConfig(
            output_dir=str(given.run.work_dir),
            use_cpu=True,
            seed=given.spec.seed,  # draws the first weights of the adapter
            bf16=False,  # the loop casts
            activation_checkpointing=False,  # enabled with the base model
            gradient_checkpointing=None,  # type: ignore[arg-type]
            packing=True,
            max_length=given.spec.max_seq_len,
            dataset_kwargs={"skip_prepare_dataset": True},
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset(given.pack.train.read(0).slice(0, PREPARED)),
        processing_class=given.tokenizer,
        peft_config=lora_config(given.spec, given.base),
    )
    hold_trained_in_fp32(trainer.model)
    return Tokens(given, trainer.model)


class Tokens:
    """An ``engine.training.runtime.objectives.Objective`` over windows of tokens."""

    def __init__(self, given: Ingredients, model: Any) -> None:
        self.model = model
        self._spec, self._device = given.spec, given.device
        self._joined = attention.of(given.base) in attention.JOINED
        self._context = given.context
        self._filled = attention.window_length(attention.of(given.base), given.spec.max_seq_len)
        self._balances = given.spec.train_router
        alpha = given.spec.optimization.neftune_noise_alpha
        self._noise = EmbeddingNoise(decoder.text_decoder(given.base).get_input_embeddings(), alpha) if alpha else None
        self._longest = max_packed_len(given.base.config.to_dict())
        self._train = _ShardedWindows(given.pack.train)
        self._validation = None if given.pack.validation is None else _Windows(given.pack.validation)
        self._pad = given.tokenizer.pad_token_id or 0
        self._correct = torch.zeros((), dtype=torch.int64, device=given.device)
        self._labelled = 0
        self._by_source = LossBySource(given.spec.sources, given.device) if given.spec.sources else None
        self._pack_of, self._place = given.pack.train.pack_of, given.pack.train.place
        self._validation_packs = np.repeat(np.arange(len(given.pack.validation_rows)), given.pack.validation_rows)
        self._validation_weights = given.pack.validation_weights

    def collate(self, rows: Sequence[int]) -> Batch:
        windows = [self._train.window(r) for r in rows]
        batch = self.collate_windows(windows)
        if self._by_source is not None:
            batch["sources"] = torch.from_numpy(np.repeat([self._pack_of(r) for r in rows], [num_scored(w) for w in windows]))
        if self._noise is not None:
            batch["lengths"] = torch.from_numpy(example_lengths(batch["position_ids"].numpy()))
        return self._part(batch)

    def _part(self, batch: Batch) -> Batch:
        """Returns this rank's part of the batch, if ranks share windows."""
        return batch if self._context is None else self._context.part(batch)

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"][:, 1:] != -100).sum())

    def num_tokens(self, batch: Batch) -> int:
        return int(batch["num_tokens"])

    def prepare_step(self, model: Any, batches: Iterable[Batch]) -> None:
        """Does nothing: the loss of a token depends on its example alone."""

    def loss(self, model: Any, batch: Batch, *, total_weight: float) -> torch.Tensor:
        if self._noise is not None:
            self._noise.lengths = batch["lengths"]
        scores = self._scores(model, batch)
        self._correct += scores["correct"]
        self._labelled += len(scores["log_probs"])
        if self._by_source is not None:
            self._by_source.add(-scores["log_probs"], batch["sources"])
        share = -scores["log_probs"].sum() / max(total_weight, 1.0)
        if "balance" in scores:
            share = share + scores["balance"] * (self.weight(batch) / max(total_weight, 1.0))
        return share

    def metrics(self) -> Mapping[str, float]:
        correct, labelled = reduce_sum([float(self._correct), float(self._labelled)], self._device)
        found = {"mean_token_accuracy": correct / labelled if labelled else 0.0, "num_trained_tokens": labelled}
        self._correct.zero_()
        self._labelled = 0
        return found if self._by_source is None else found | self._by_source.take(counted="num_trained_tokens")

    def validate(self, model: Any, *, stop: Callable[[], bool]) -> Mapping[str, float]:
        """Returns the mean loss per labeled token and its perplexity, one window at a time and without dropout.

        Of a mixture also the mean over each source's part, of which the first is then the mean by the tokens that an epoch reads of each,
        unless a validation file is measured.
        """
        if self._validation is None:
            return {}
        by_source = bool(self._validation_weights)
        sums = np.zeros((len(self._spec.sources) if by_source else 1, 2))
        with quiet(model):
            for row in range(self._validation.num_rows):
                if stop():
                    return {}
                scores = self._scores(model, self._part(self.collate_windows([self._validation.window(row)])))
                loss, scored = -scores["log_probs"].double().sum().item(), len(scores["log_probs"])
                sums[self._validation_packs[row] if by_source else 0] += (loss, scored)
        if self._context is not None:
            sums = self._context.sum(torch.from_numpy(sums).to(self._device)).cpu().numpy()
        means = [loss / n if n else None for loss, n in sums.tolist()]
        weighed = [(mean, weight) for mean, weight in zip(means, self._validation_weights or (1.0,), strict=True) if mean is not None]
        if not weighed:
            return {}
        loss = sum(mean * weight for mean, weight in weighed) / sum(weight for _, weight in weighed)
        of = list(zip(self._spec.sources, means, strict=True)) if by_source else []
        return {
            "eval_loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            **{f"eval_loss/{source.dataset_id}": mean for source, mean in of if mean is not None},
        }

    def self_test(self, model: Any) -> Mapping[str, float]:
        """Verifies on each pack's first windows with several examples that packing is exact (see ``self_test.py``)."""
        count = self._spec.optimization.per_device_batch_size
        chosen = choose_windows(self._first_windows(), count=count if self._filled else max(SELF_TEST_WINDOWS, count))
        if any(len(w.seq_lengths) > 1 for w in chosen) and self._longest is not None and self._spec.max_seq_len > self._longest:
            limit = f", or max_seq_len to at most {self._longest}" if self._longest else ""
            raise PackingRefused(f"the base model cannot keep examples of a window apart; set packing to false{limit}", cause="state")
        with quiet(model):
            found = check_packing(
                chosen,
                collate=self.collate_windows,
                forward=lambda batch: self._log_probs(model, batch),
                alone=lambda ids, positions: self._plain_loss(model, ids, positions),
                precision=self._spec.precision,
            )
        return {"examples": found.examples, "boundaries": found.boundaries, "worst": found.worst}

    def _first_windows(self) -> list[Window]:
        """Returns the windows that are searched: the first one of each pack, the second one of each, and so on."""
        shards = [self._train.shard(number) for number in self._train.first_of_packs]
        return [shard.window(row) for row in range(MAX_SELF_TEST_SEARCH) for shard in shards if row < shard.num_rows]

    def blame(self, model: Any, rows: Sequence[int]) -> None:
        def is_finite(row: int) -> bool:
            bad = (~torch.isfinite(self._scores(model, self.collate([row]))["log_probs"].sum())).double()
            return not (bad if self._context is None else self._context.sum(bad))

        with quiet(model):
            blame(rows, is_finite, what="window", remedy="remove its rows", place=self._place)

    def collate_windows(self, windows: Sequence[Window]) -> Batch:
        width = self._filled
        if self._context is not None:
            width = -(-sum(len(w.input_ids) for w in windows) // self._context.size) * self._context.size
        batch = collate(windows, pad=self._pad, joined=self._joined, width=width)
        if self._balances:
            lengths = [sum(len(w.input_ids) for w in windows)] if self._joined else [len(w.input_ids) for w in windows]
            batch["is_token"] = (torch.arange(batch["input_ids"].shape[1])[None] < torch.tensor(lengths)[:, None]).long()
        return batch

    def _scores(self, model: Any, batch: Batch) -> token_logps.Scores:
        inputs = {k: v for k, v in batch.items() if k in MODEL_INPUTS}
        target = {"score": batch["labels"], "scored": batch["scored"]}
        found: token_logps.Scores = model(**moved(inputs | target, self._device), use_cache=False)
        return found

    def _log_probs(self, model: Any, batch: Batch) -> torch.Tensor:
        """Returns those of all labeled tokens of a whole batch, whichever ranks computed them."""
        found = self._scores(model, self._part(batch))["log_probs"]
        return found if self._context is None else self._context.joined(batch, found)

    def _plain_loss(self, model: Any, ids: NDArray[np.int32], positions: NDArray[np.int64]) -> float:
        with attention.reference(self.model):
            return plain_loss(model, ids, positions, self._device)


def num_scored(window: Window) -> int:
    """Returns the labeled tokens of a window: those that begin an example are not predicted."""
    labels = window.labels != -100
    return int(labels.sum() - labels[np.cumsum(window.seq_lengths) - window.seq_lengths].sum())


class _Windows:
    """Windows of a pack by number, without building Python lists of all of them."""

    def __init__(self, table: pa.Table) -> None:
        self.num_rows = table.num_rows
        self._columns = {name: values_and_offsets(table, name) for name in ("input_ids", "labels", "seq_lengths")}

    def window(self, row: int) -> Window:
        ids, labels, lengths = (values[offsets[row] : offsets[row + 1]] for values, offsets in self._columns.values())
        return Window(input_ids=ids, labels=labels, seq_lengths=lengths)


class _ShardedWindows:
    """Windows of a pack's training part by number; waits for their shard."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.first_of_packs = shards.first_of_packs
        self.shard = functools.lru_cache(maxsize=shards.num_kept)(lambda shard: _Windows(shards.read(shard)))

    def window(self, row: int) -> Window:
        shard, row = self._shards.find(row)
        return self.shard(shard).window(row)


def collate(windows: Sequence[Window], *, pad: int, joined: bool, width: int | None = None) -> Batch:
    """Makes one batch of windows. Positions restart and the first label of each example is masked: no prediction crosses a boundary.

    `joined`: one after another in a single row, with the boundaries of their examples, as flash attention expects packed sequences;
    otherwise one row each, padded with an unlabeled example; all to `width` if it is given.
    """
    rows = [_join(windows)] if joined else list(windows)
    width = width or max(len(w.input_ids) for w in rows)
    ids = np.full((len(rows), width), pad, np.int64)
    labels = np.full((len(rows), width), -100, np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    for i, window in enumerate(rows):
        n, starts = len(window.input_ids), np.cumsum(window.seq_lengths) - window.seq_lengths
        ids[i, :n], labels[i, :n] = window.input_ids, window.labels
        labels[i, starts] = -100
        positions[i, :n] = np.arange(n) - np.repeat(starts, window.seq_lengths)
        positions[i, n:] = np.arange(width - n)
    batch: Batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), "position_ids": torch.from_numpy(positions)}
    batch["scored"] = token_logps.scored_positions(batch["labels"])
    if joined:
        ends = np.cumsum(rows[0].seq_lengths)
        padding = [width] if width > ends[-1] else []  # one more example
        batch["cu_seq_lens_q"] = torch.from_numpy(np.array([0, *ends, *padding], np.int32))
    batch["num_tokens"] = sum(len(w.input_ids) for w in windows)
    return batch


def _join(windows: Sequence[Window]) -> Window:
    return Window(*(np.concatenate([getattr(w, name) for w in windows]) for name in ("input_ids", "labels", "seq_lengths")))
