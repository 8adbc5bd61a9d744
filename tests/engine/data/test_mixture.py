"""How much of each file a mixture reads, and which requests for one are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from engine.data import mixture
from engine.data.mixture import MixedFile


@dataclass(frozen=True, kw_only=True)
class Pack:
    num_rows: int
    num_tokens: int


def weighted(*weights: float) -> list[MixedFile]:
    return [MixedFile(file=f"file-{n}", weight=weight) for n, weight in enumerate(weights)]


def test_equal_weights_read_as_many_tokens_of_a_small_file_as_of_a_large_one() -> None:
    found = mixture.mixture_repeats(weighted(1, 1), [9_000, 1_000])
    assert found == pytest.approx([5 / 9, 5.0])


def test_an_epoch_of_weights_reads_as_many_tokens_as_the_files_have() -> None:
    sizes = [700, 200, 100]
    assert sum(n * size for n, size in zip(mixture.mixture_repeats(weighted(5, 3, 2), sizes), sizes, strict=True)) == pytest.approx(1000)


def test_a_token_budget_leaves_the_shares_of_the_others_alone() -> None:
    files = [MixedFile(file="a", weight=3.0), MixedFile(file="b", weight=1.0), MixedFile(file="c", tokens=500)]
    assert mixture.mixture_repeats(files, [600, 200, 1000]) == pytest.approx([1.0, 1.0, 0.5])


def test_files_without_either_are_read_once() -> None:
    files = [MixedFile(file="a"), MixedFile(file="b"), MixedFile(file="c", tokens=50)]
    assert mixture.mixture_repeats(files, [600, 7, 10]) == [1.0, 1.0, 5.0]


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 10**9)), min_size=1, max_size=16), st.floats(0.01, 1000))
def test_only_the_ratio_of_weights_counts(drawn: list[tuple[float, int]], factor: float) -> None:
    sizes = [size for _, size in drawn]
    once = mixture.mixture_repeats(weighted(*(weight for weight, _ in drawn)), sizes)
    assert mixture.mixture_repeats(weighted(*(weight * factor for weight, _ in drawn)), sizes) == pytest.approx(once)
    tokens = [n * size for n, size in zip(once, sizes, strict=True)]
    assert sum(tokens) == pytest.approx(sum(sizes))
    assert [count / drawn[0][0] * weight for count, (weight, _) in zip([tokens[0]] * len(drawn), drawn, strict=True)] == pytest.approx(
        tokens
    )


def test_sources_count_rows_by_tokens_and_read_at_least_one() -> None:
    packs = [Pack(num_rows=10, num_tokens=1000), Pack(num_rows=50, num_tokens=1000)]
    files = [MixedFile(file="a", tokens=300), MixedFile(file="b", tokens=1)]
    found = mixture.rows_per_epoch(files, packs)
    assert found == [3, 1]
    assert next(iter(mixture.described_mixture(files, found, packs))) == "a 0.3 times (300 tokens, 93.8%)"


@pytest.mark.parametrize(("tokens", "num_rows"), [(240, 2), (260, 3), (999, 10)])
def test_an_epoch_reads_the_nearest_number_of_whole_rows(tokens: int, num_rows: int) -> None:
    assert mixture.rows_per_epoch([MixedFile(file="a", tokens=tokens)], [Pack(num_rows=10, num_tokens=1000)]) == [num_rows]


def test_a_file_that_would_be_read_a_hundred_times_an_epoch_is_refused() -> None:
    packs = [Pack(num_rows=10, num_tokens=1000), Pack(num_rows=1, num_tokens=1)]
    with pytest.raises(InvalidRequest, match="an epoch would read file-1 500 times, at most 100; lower its weight") as refused:
        mixture.rows_per_epoch(weighted(1, 1), packs)
    assert (refused.value.code, refused.value.param) == ("invalid_training_files", "training_files[1].weight")


REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "no file": ([], "names 0 files; name 1 to 16", ""),
    "too many": ([{"file": f"file-{n}"} for n in range(17)], "names 17 files; name 1 to 16", ""),
    "text": (["file-a"], "is not an object", "[0]"),
    "no id": ([{"weight": 1}], "names no file", "[0].file"),
    "twice": ([{"file": "file-a"}, {"file": "file-a"}], "names file-a twice", "[1].file"),
    "both": ([{"file": "file-a", "weight": 1, "tokens": 5}], "has both weight and tokens", "[0].tokens"),
    "unknown field": ([{"file": "file-a", "share": 0.5}], "unknown field 'share'", "[0].share"),
    "unknown field without a value": ([{"file": "file-a", "note": None}], "unknown field 'note'", "[0].note"),
    "zero": ([{"file": "file-a", "weight": 0}], "weight 0 of file-a is not above 0", "[0].weight"),
    "negative": ([{"file": "file-a", "weight": -1.5}], "weight -1.5 of file-a is not above 0", "[0].weight"),
    "not a number": ([{"file": "file-a", "weight": float("nan")}], "weight nan", "[0].weight"),
    "true": ([{"file": "file-a", "weight": True}], "weight True", "[0].weight"),
    "huge": ([{"file": "file-a", "weight": 1e7}], "at most 1,000,000", "[0].weight"),
    "half a token": ([{"file": "file-a", "tokens": 0.5}], "is not a whole number", "[0].tokens"),
    "no token": ([{"file": "file-a", "tokens": 0}], "is not a whole number from 1", "[0].tokens"),
    "a missing weight": ([{"file": "file-a", "weight": 1}, {"file": "file-b"}], "file-b has no weight, but another file has", "[1].weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_is_not_a_mixture_is_refused_by_the_name_of_its_field(case: str) -> None:
    body, message, place = REFUSED[case]
    with pytest.raises(InvalidRequest) as refused:
        mixture.parse_mixture(body)
    assert message in refused.value.message
    assert (refused.value.code, refused.value.param) == ("invalid_training_files", f"training_files{place}")


def test_nulls_count_as_absent() -> None:
    assert mixture.parse_mixture([{"file": "file-a", "weight": 2, "tokens": None}, {"file": "file-b", "tokens": 7}]) == (
        MixedFile(file="file-a", weight=2.0), MixedFile(file="file-b", tokens=7),
    )  # fmt: skip
