"""Common part of DPO, ORPO, SimPO and KTO: TRL's trainer supplies the loss; the rest of it is not used.

The trainer is built over rows that are marked as prepared, so that it neither tokenizes nor scores a dataset; it never trains, and its
exchanges between ranks are off: what a micro-batch's loss needs from the others is measured once per step, over all of them and all ranks
(``prepare_step``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from datasets import Dataset
from peft import get_peft_model
from trl.trainer.utils import add_fused_lm_head

from engine.training import methods
from engine.training.runtime.collectives import reduce_sum
from engine.training.runtime.model.weights import hold_trained_in_fp32, lora_config
from engine.training.runtime.objectives import Batch, Ingredients, LossBySource, blame, moved, quiet, reference_reader
from engine.training.runtime.objectives.batches import Pairs, Rows, of_rows
from engine.training.runtime.objectives.preference_self_test import check_padding, check_reference

SOURCES = "sources"
"""Key of a batch: the number of each row's source, shape (rows,)."""
EVALUATED = ("loss", "rewards/accuracies", "rewards/margins")
"""Metrics of validation, if the method has them."""


class Prepared(Dataset):  # type: ignore[misc]
    """Rows that need no preparation: mapping and filtering leave them unchanged."""

    def map(self, *_: Any, **__: Any) -> Prepared:
        return self

    def filter(self, *_: Any, **__: Any) -> Prepared:
        return self


class LossOnly:
    """Mixin for a trainer of TRL that replaces what the loop, the strategy and the reference files do."""

    def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _move_model_to_device(self, *_: Any) -> None:
        return None


def arguments(given: Ingredients) -> dict[str, Any]:
    """Returns the method-independent part of a trainer's configuration."""
    return {
        "output_dir": str(given.run.work_dir),
        "use_cpu": given.device.type == "cpu",
        "seed": given.spec.seed,
        "max_length": given.spec.max_seq_len,
        "per_device_train_batch_size": given.spec.optimization.per_device_batch_size,
        "disable_dropout": False,
        "bf16": False,  # the loop casts
        "gradient_checkpointing": False,  # enabled when the base model is loaded
        "remove_unused_columns": False,
        "report_to": "none",
        "save_strategy": "no",
    }


def single_device(config: Any) -> Any:
    """Returns `config` limited to one GPU: with several visible, the trainer would split batches over them."""
    if config.device.type == "cuda":
        config._n_gpu = 1
    return config


def pair_objective(given: Ingredients, trainer_class: Callable[..., Any], config: Any) -> Preference:
    """Builds the objective of a method on pairs without a reference."""
    add_fused_lm_head(given.base, outputs=("log_probs", "mean_logits"))
    model = given.base
    if (lora := lora_config(given.spec, given.base)) is not None:
        torch.manual_seed(given.spec.seed)
        # Passed with its adapter: given only a quantized base, these trainers hold its embeddings and norms in float32.
        model = get_peft_model(given.base, lora)
    rows = Prepared.from_dict({"prompt": [""], "chosen": [""], "rejected": [""]})
    trainer = trainer_class(model, args=single_device(config), data_collator=unused, train_dataset=rows, processing_class=given.tokenizer)
    return Preference(given, trainer, **parts(given, Pairs))


def parts(given: Ingredients, rows: Callable[..., Rows]) -> dict[str, Any]:
    """Returns both parts of the pack as `rows`, with their references if the method needs them, by the names of arguments of
    :class:`Preference`. Reads the pack once."""
    pad, train, held_out = given.tokenizer.pad_token_id or 0, given.pack.train.whole(), given.pack.validation
    needed = methods.method_named(given.spec.method).needs_reference
    references = reference_reader.load(given.run, given.pack, train) if needed else (None, None)
    return {
        "train": rows(train, references[0], pad=pad),
        "validation": None if held_out is None else rows(held_out, references[1], pad=pad),
    }


def fused_forward(model: Any, batch: Batch, labelled: torch.Tensor) -> Any:
    """Scores the tokens where `labelled` is not 0, without logits of the whole batch."""
    return model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["input_ids"].masked_fill(labelled == 0, -100),
        use_cache=False,
        fused_lm_head=True,
    )


def reference_trainer(given: Ingredients, library: Any, trainer_class: Callable[..., Any], config: Any, rows: dict[str, Any]) -> Any:
    """Builds a trainer of module `library`, which would hash all weights to name a file of reference log-probabilities that it does not
    write here."""
    original = library.hash_module
    library.hash_module = lambda *_: ""
    try:
        return trainer_class(
            given.base,
            args=single_device(config),
            data_collator=unused,
            train_dataset=Prepared.from_dict(rows),
            processing_class=given.tokenizer,
            peft_config=lora_config(given.spec, given.base),
        )
    finally:
        library.hash_module = original


def unused(_: Any) -> NoReturn:
    """Collator of a trainer that never makes a batch."""
    raise AssertionError("the trainer of the library was asked to make a batch")


class Preference:
    """An ``engine.training.runtime.objectives.Objective`` with the loss of one of TRL's trainers."""

    def __init__(self, given: Ingredients, trainer: Any, *, train: Rows, validation: Rows | None) -> None:
        self._spec, self._device = given.spec, given.device
        self._trainer, self._train, self._validation = trainer, train, validation
        self.model = trainer.model
        trainer.aux_loss_enabled = False  # TRL would add the router's load-balancing loss, although routers are frozen
        hold_trained_in_fp32(self.model)
        # Otherwise TRL gathers a dozen numbers over the ranks for its metrics.
        trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = _as_it_is
        self._names = methods.method_named(given.spec.method).metrics
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._sources = given.spec.sources
        self._by_source = LossBySource(given.spec.sources, given.device) if given.spec.sources else None
        self._pack_of, self._place = given.pack.train.pack_of, given.pack.train.place
        self._validation_rows, self._validation_weights = given.pack.validation_rows, given.pack.validation_weights

    def collate(self, rows: Sequence[int]) -> Batch:
        batch = self._train.collate(rows)
        if self._by_source is not None:
            batch[SOURCES] = torch.tensor([self._pack_of(row) for row in rows])
        return batch

    def weight(self, batch: Batch) -> float:
        return self._train.weight(batch)

    def num_tokens(self, batch: Batch) -> int:
        return int(batch["attention_mask"].sum())

    def prepare_step(self, model: Any, batches: Iterable[Batch]) -> None:
        """Does nothing: the loss of a pair depends on that pair alone."""

    def loss(self, model: Any, batch: Batch, *, total_weight: float) -> torch.Tensor:
        weight, scored = self._train.weight(batch), {name: value for name, value in batch.items() if name != SOURCES}
        recorded = None if self._by_source is None else Recorded(model)
        share: torch.Tensor = self._trainer.compute_loss(recorded or model, scored) * (weight / total_weight)
        for name, (value, count) in self._take_metrics(scored).items():
            self._sums[name] += value * count
            self._counts[name] += count
        if self._by_source is not None and recorded is not None:
            self._count_sources(self._by_source, recorded, scored, batch[SOURCES])
        return share

    def _count_sources(self, by_source: LossBySource, recorded: Recorded, batch: Batch, sources: torch.Tensor) -> None:
        """Counts the loss of each source's rows, from the pass that was already made: every rank makes the same number of passes, whatever
        its rows."""
        with torch.no_grad():
            for source in sorted(set(sources.tolist())):
                chosen = sources == source
                loss = self._trainer.compute_loss(recorded.of_rows(chosen), of_rows(batch, chosen))
                self._take_metrics(batch)
                by_source.add(loss.expand(int(chosen.sum())), sources[chosen])

    def metrics(self) -> Mapping[str, float]:
        """Returns means over the rows of all micro-batches and ranks. Every rank calls it."""
        sums, counts = [self._sums[n] for n in self._names], [self._counts[n] for n in self._names]
        self._sums.clear()
        self._counts.clear()
        found = self.derived(_means(self._names, reduce_sum(sums + counts, self._device)))
        return found if self._by_source is None else found | self._by_source.take(counted="num_rows")

    def validate(self, model: Any, *, stop: Callable[[], bool]) -> Mapping[str, float]:
        """Returns means over the validation rows. Of a mixture also the loss of each source's part, as if it was measured alone, by what an
        epoch reads of which all means are then weighed, unless a validation file is measured."""
        if self._validation is None:
            return {}
        names, parts = ("loss", *self._names), self._validation_rows or (self._validation.num_rows,)
        sums, counts = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        losses, stop_requested, start = dict[str, float](), [False], 0
        for number, size in enumerate(parts):
            rows, start = range(start, start + size), start + size
            if not rows:
                continue
            of_part = self._measured(model, self._validation, rows, names, stop, stop_requested)
            if stop_requested[0]:
                return {}
            scale = self._validation_weights[number] / size if self._validation_weights else 1.0
            for name, (total, count) in of_part.items():
                sums[name] += scale * total
                counts[name] += scale * count
            if self._validation_weights:
                losses[f"eval_loss/{self._sources[number].dataset_id}"] = of_part["loss"][0] / of_part["loss"][1]
        means = self.derived(_means(names, [*sums.values(), *counts.values()]))
        return {f"eval_{name}": means[name] for name in EVALUATED if name in means} | losses

    def _measured(
        self, model: Any, validation: Rows, rows: Sequence[int], names: Sequence[str], stop: Callable[[], bool], stop_requested: list[bool]
    ) -> dict[str, tuple[float, float]]:
        """Returns sum and count of each metric over `rows` of the validation part."""
        found = dict.fromkeys(names, (0.0, 0.0))
        with quiet(model):
            self.prepare_step(model, self._micro_batches(validation, rows, stop, stop_requested))
            for batch in self._micro_batches(validation, rows, stop, stop_requested):
                loss = float(self._trainer.compute_loss(model, batch))
                measured = {"loss": (loss, validation.weight(batch)), **self._take_metrics(batch)}
                for name, (value, count) in measured.items():
                    found[name] = found[name][0] + value * count, found[name][1] + count
        return found

    def _micro_batches(
        self, validation: Rows, rows: Sequence[int], stop: Callable[[], bool], stop_requested: list[bool]
    ) -> Iterator[Batch]:
        """Yields all of `rows`; ends early, and sets `stop_requested`, once any rank is asked to stop."""
        size = self._spec.optimization.per_device_batch_size
        for first in range(0, len(rows), size):
            stop_requested[0] = stop_requested[0] or reduce_sum([float(stop())], self._device)[0] > 0
            if stop_requested[0]:
                return
            yield self._here(validation.collate(rows[first : first + size]))

    def self_test(self, model: Any) -> Mapping[str, float]:
        """Verifies that padding does not change a sequence, and that the reference belongs to this model."""
        size = self._spec.optimization.per_device_batch_size
        with quiet(model):
            found = {"padding": check_padding(model, self._train, batch_size=size, spec=self._spec, put=self._here)}
            worst = check_reference(model, self._train, batch_size=size, spec=self._spec, put=self._here)
        return found if worst is None else found | {"reference": worst}

    def blame(self, model: Any, rows: Sequence[int]) -> None:
        def is_finite(row: int) -> bool:
            batch = self._here(self._train.collate([row]))
            self.prepare_step(model, [batch])
            return bool(torch.isfinite(self._trainer.compute_loss(model, batch)))

        blame(rows, is_finite, what="row", remedy="remove it", place=self._place)

    def counted(self, name: str, batch: Batch) -> float:
        """Returns the number of rows of `batch` that the mean of metric `name` covers."""
        del name
        return self._train.weight(batch)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Corrects those of `means` that are not means over rows."""
        return means

    def _take_metrics(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Returns value and count of each metric of the batch just computed, and clears the trainer's."""
        stores: Mapping[str, Any] = getattr(self._trainer, "_metrics", None) or self._trainer._stored_metrics
        found = {name: values[-1] for store in stores.values() for name, values in store.items() if values}
        for store in stores.values():
            store.clear()
        return {name: (float(found[name]), self.counted(name, batch)) for name in self._names if name in found}

    def _here(self, batch: Batch) -> Batch:
        return moved(batch, self._device)


class Recorded:
    """Passes a batch through `model` and keeps what came out, from which the loss of some of its rows follows without another pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._out: Any = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        self._out = self._model(*args, **inputs)
        return self._out

    def of_rows(self, chosen: torch.Tensor) -> Callable[..., Any]:
        """Returns a model whose answer is the kept one for the `chosen` rows: shape (rows,)."""
        kept = SimpleNamespace(**of_rows({name: value for name, value in self._out.items() if isinstance(value, torch.Tensor)}, chosen))
        return lambda *_, **__: kept


def _means(names: Sequence[str], sums_then_counts: Sequence[float]) -> dict[str, float]:
    sums, counts = sums_then_counts[: len(names)], sums_then_counts[len(names) :]
    return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}


def _as_it_is(value: Any) -> Any:
    return value
