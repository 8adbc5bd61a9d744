"""Published throughputs of trainings, each with its source, and what the cost model says of the same training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.training import cost_model, model_shapes
from engine.training.memory import Case
from engine.training.model_shapes import ModelShape

FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One row of a source's table."""

    source: str
    model: str
    gpu: str
    case: Case
    tokens_per_s_per_gpu: float
    chose_constants: bool
    """A number of the cost model was chosen with it; agreement says nothing."""
    note: str

    @property
    def modelled(self) -> float:
        """Tokens a second and GPU by the cost model."""
        return cost_model.tokens_per_second(self.case, self.gpu) / self.case.world_size

    @property
    def ratio(self) -> float:
        """Modelled throughput over the published one; a job took as many times as long as was expected."""
        return self.modelled / self.tokens_per_s_per_gpu


def read(path: Path = FILE) -> list[Published]:
    data = yaml.safe_load(path.read_text())
    own = {name: ModelShape(**fields) for name, fields in data["shapes"].items()}
    return [_row(row, own, data["sources"]) for row in data["rows"]]


def _row(row: Mapping[str, Any], own: Mapping[str, ModelShape], sources: Mapping[str, Any]) -> Published:
    shape = own.get(row["model"]) or model_shapes.well_known_shape(row["model"])
    if shape is None or row["source"] not in sources:
        raise ValueError(f"{FILE.name}: model {row['model']!r} has no shape, or source {row['source']!r} no entry; add it above the rows")
    case = Case(
        shape=shape, adapter=row["adapter"], max_seq_len=row["max_seq_len"], per_device_batch_size=row["batch"], rank=row["rank"],
        attention="flash_attention_2", gradient_checkpointing=row["checkpointing"], strategy=row["strategy"], world_size=row["num_gpus"],
    )  # fmt: skip
    return Published(
        source=row["source"], model=row["model"], gpu=row["gpu"], case=case, tokens_per_s_per_gpu=row["tokens_per_s_per_gpu"],
        chose_constants=row["chose_constants"], note=row.get("note", ""),
    )  # fmt: skip


def held_out(rows: Iterable[Published]) -> list[float]:
    """Ratios of the rows that chose no constant, smallest first."""
    return sorted(row.ratio for row in rows if not row.chose_constants)


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Geometric mean of `ratios`, and the standard deviation of their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    return math.exp(mean), math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
