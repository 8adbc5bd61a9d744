"""The cost model as a table, beside published throughputs: ``python -m benchmarks.estimates [--out FILE.md]``; seconds, needs no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import yaml

from benchmarks.estimates import published
from benchmarks.scheduler.simulation.tables import markdown
from core.errors import InvalidRequest
from engine.training import cost_model, memory, model_shapes
from engine.training.memory import GANG_SIZES, Case

OUT = Path(__file__).parents[1] / "estimates_202611.md"
TOKENS = 100_000_000
SEQUENCE, BATCH = 4096, 32
"""Tokens of a window, windows of a step."""
Adapter = Literal["lora", "qlora", "full"]
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
GPUS = ("h100-80gb", "a100-80gb", "l4-24gb")
ADAPTERS: tuple[Adapter, ...] = get_args(Adapter)
RANKS = {"llama-3.1-8b": 16, "llama-3.1-70b": 32}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    args.out.write_text(page())


def page() -> str:
    parts = [
        "# What the cost model expects, beside what others measured\n\nMade by `python -m benchmarks.estimates`. Nothing here was measured "
        "on this project's code: the published throughputs come from other trainers.\n",
        f"## {TOKENS / 1e6:.0f}M tokens of SFT, windows of {SEQUENCE:,}, {BATCH} a step, bf16, flex attention\n\nHours / GPU-hours, with "
        "the strategy, the micro-batch and the recomputation that the memory estimate chooses; `-`: does not fit, or a step of 32 "
        "windows is not divisible so.\n",
        markdown(["model", "adapter", "GPU", *map(str, GANG_SIZES)], list(_expected())),
        "\n## Published throughputs\n\nTokens a second and GPU. `c`: the row chose a constant; the others were not looked at for that.\n",
        _compared(),
        _sources(),
    ]
    return "\n".join(parts) + "\n"


def _expected() -> Iterator[list[str]]:
    for model in MODELS:
        for adapter in ADAPTERS:
            for gpu in GPUS:
                cells = []
                for count in GANG_SIZES:
                    case = placed(model, adapter, gpu, count)
                    if case is None:
                        cells.append("-")
                        continue
                    hours = cost_model.training_cost(case, gpu, rows=TOKENS / SEQUENCE, tokens=TOKENS).total_s / 3600
                    cells.append(f"{hours:.2f} / {hours * count:.1f}")
                yield [model, adapter, gpu, *cells]


def placed(model: str, adapter: Adapter, gpu: str, count: int) -> Case | None:
    """As the platform would train it on `count` GPUs; None where it does not fit."""
    shape = model_shapes.well_known_shape(model)
    assert shape is not None
    case = Case(
        shape=shape, adapter=adapter, max_seq_len=SEQUENCE, rank=RANKS[model], attention="flex_attention", gradient_checkpointing=True,
    )  # fmt: skip
    try:
        fit = memory.Placement(gpu=memory.GPUS[gpu], max_gpus=count, global_batch=BATCH, num_gpus=count).fit(case)
    except InvalidRequest:
        return None
    return replace(
        case, per_device_batch_size=fit.per_device_batch_size, gradient_checkpointing=fit.gradient_checkpointing, strategy=fit.strategy,
        world_size=count,
    )  # fmt: skip


def _compared() -> str:
    rows = published.read()
    told = [
        [r.source, r.model, r.case.adapter, r.gpu, str(r.case.world_size), f"{r.case.max_seq_len} x {r.case.per_device_batch_size}",
         "yes" if r.case.gradient_checkpointing else "no", f"{r.tokens_per_s_per_gpu:,.0f}", f"{r.modelled:,.0f}", f"{r.ratio:.2f}",
         "c" if r.chose_constants else ""]
        for r in rows
    ]  # fmt: skip
    head = ["source", "model", "adapter", "GPU", "GPUs", "tokens x batch", "recomputes", "published", "modelled", "ratio", ""]
    held = published.held_out(rows)
    mean, sigma = published.spread(held)
    return (
        f"{markdown(head, told)}\n\n{len(held)} rows not used for calibration: {held[0]:.2f} to {held[-1]:.2f}, geometric mean {mean:.2f}, "
        f"standard deviation of the logarithm {sigma:.2f}. The highest are trainers without fused kernels "
        "at one window of up to 2,048 tokens.\n"
    )


def _sources() -> str:
    data = yaml.safe_load(published.FILE.read_text())
    lines = [f"- `{name}`: {one['says']} {one['url']} (read {one['read']})" for name, one in data["sources"].items()]
    left_out = [f"- {one}" for one in data["left_out"]]
    return "\n".join(["## Sources\n", *lines, "\n## Looked at and left out\n", *left_out])


if __name__ == "__main__":
    main()
