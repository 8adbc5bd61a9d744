"""The cost model against published throughputs: `benchmarks/estimates/published.yaml` names the source of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import yaml

from benchmarks.estimates import __main__ as table
from benchmarks.estimates import published
from benchmarks.estimates.published import Published
from engine.training.cost_model import training_cost
from engine.training.memory import GANG_SIZES

ROWS = published.read()


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda r: f"{r.source}-{r.model}-{r.case.adapter}-{r.case.world_size}x{r.gpu}-{r.case.max_seq_len}"
)
def test_a_published_throughput_is_within_a_factor_of_two(row: Published) -> None:
    assert 0.5 < row.ratio < 2.0


def test_rows_that_chose_no_constant_agree_too() -> None:
    held = [row for row in ROWS if not row.chose_constants]
    assert len(held) >= 12 and len({row.source for row in held}) >= 4
    assert {row.case.adapter for row in held} == {"lora", "qlora", "full"}
    mean, sigma = published.spread([row.ratio for row in held])
    assert 0.8 < mean < 1.25 and sigma < 0.25


def test_numbers_chosen_with_rows_have_no_bias_over_them() -> None:
    sources = ("llm-foundry", "vectorlm")
    mean, _ = published.spread([row.ratio for row in ROWS if row.chose_constants and row.source in sources])
    assert mean == pytest.approx(1.0, abs=0.05)


def test_each_source_says_where_and_when_it_was_read() -> None:
    sources = yaml.safe_load(published.FILE.read_text())["sources"]
    assert {row.source for row in ROWS} == set(sources)
    assert all(one["url"].startswith("https://") and one["read"] and one["says"] for one in sources.values())


def test_the_table_is_that_of_the_model() -> None:
    assert table.OUT.read_text() == table.page(), "run python -m benchmarks.estimates"


@pytest.mark.parametrize("model", table.MODELS)
@pytest.mark.parametrize("adapter", table.ADAPTERS)
@pytest.mark.parametrize("gpu", table.GPUS)
def test_what_is_placed_on_more_gpus_ends_sooner(model: str, adapter: table.Adapter, gpu: str) -> None:
    placed = [case for count in GANG_SIZES if (case := table.placed(model, adapter, gpu, count))]
    took = [training_cost(case, gpu, rows=table.TOKENS / table.SEQUENCE, tokens=table.TOKENS).total_s for case in placed]
    assert took == sorted(took, reverse=True)
    used = [seconds * case.world_size for seconds, case in zip(took, placed, strict=True)]
    assert all(after > 0.98 * before for before, after in pairwise(used)), "a larger micro-batch saves 2 % at most"
