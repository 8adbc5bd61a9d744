"""A mix as operators write it: what is refused, with which words, and what a kind's size becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_plane.planning import job_mix, kind_sizes
from control_plane.planning.arrivals import submissions
from control_plane.planning.sized_kind import SizedKind
from core.errors import InvalidRequest
from engine.scheduler.pools import Pool, equal_nodes

ONE: dict[str, Any] = {"name": "one", "share": 100, "gpu_hours": 2, "gpus": 1}
BODY: dict[str, Any] = {"jobs_a_day": 100, "kinds": [ONE]}
POOL = Pool(name="gpus", nodes=equal_nodes(64), gpu_type="h100-80gb", max_gpus_per_job=32)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"jobs_a_day": 100}, "kinds is missing"),
        (BODY | {"jobs_a_day": -1}, "jobs_a_day is -1"),
        (BODY | {"jobs": 3}, "jobs is unknown"),
        (BODY | {"arrivals": "never"}, "arrivals is 'never': use working_hours, even, or 24 rates"),
        (BODY | {"arrivals": [1, 2, 3]}, "arrivals is [1, 2, 3]: use working_hours"),
        (BODY | {"arrivals": [-1] * 24}, "24 rates of at least 0"),
        (BODY | {"arrivals": [0] * 24}, "all rates are 0"),
        (BODY | {"kinds": [ONE | {"share": 50}]}, "add up to 50 %"),
        (BODY | {"kinds": [ONE | {"share": 50}, ONE | {"share": 50}]}, "two kinds are named one"),
        (BODY | {"kinds": [ONE | {"gpus": 33}]}, "less than or equal to 32"),
        (BODY | {"kinds": [{"name": "one", "share": 100}]}, "its length is missing"),
        (BODY | {"kinds": [ONE | {"model": "llama-3.1-8b"}]}, "both gpu_hours and model"),
        (BODY | {"kinds": [{"name": "one", "share": 100, "model": "llama-3.1-8b"}]}, "model alone; write model and tokens"),
        (BODY | {"kinds": [ONE | {"epochs": 3}]}, "epochs and adapter need a model"),
        (BODY | {"kinds": [ONE | {"tiers": {"gold": 100}}]}, "tier 'gold' is unknown"),
        (BODY | {"tiers": {"standard": 50}}, "tiers add up to 50 %"),
        ([1], "mix"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_to_write(body: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        job_mix.parse(body)
    assert refused.value.code == "invalid_mix"
    assert says in refused.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("kinds: [")
    for path in (tmp_path / "bad.yaml", tmp_path / "missing.yaml"):
        with pytest.raises(InvalidRequest, match=f"{path.name} cannot be read"):
            job_mix.load(path)


def test_large_and_full_jobs_are_of_tiers_that_may_train_them() -> None:
    tiers = {"premium": 10, "standard": 90}
    mix = job_mix.parse(BODY | {"tiers": tiers, "kinds": [ONE | {"share": 50}, ONE | {"share": 50, "name": "two", "class": "full"}]})
    assert [dict(kind.tiers) for kind in kind_sizes.sized(mix, [POOL])] == [{"premium": 0.1, "standard": 0.9}, {"premium": 1.0}]
    for given in (BODY | {"kinds": [ONE | {"class": "large", "tiers": tiers}]}, BODY | {"kinds": [ONE | {"class": "large"}]}):
        with pytest.raises(InvalidRequest, match="is of class large, which only tier premium may train"):
            kind_sizes.sized(job_mix.parse(given), [POOL])


def test_a_kind_with_a_model_has_the_size_that_an_estimate_plans() -> None:
    def sized(**fields: Any) -> SizedKind:
        kind = {"name": "m", "share": 100, "model": "llama-3.1-8b", "tokens": 50_000_000, "epochs": 2, **fields}
        (found,) = kind_sizes.sized(job_mix.parse(BODY | {"tiers": {"premium": 100}, "kinds": [kind]}), [POOL])
        return found

    lora = sized()
    assert (lora.job_class, lora.gpus) == ("lora", (1,))
    # 100M tokens at 14 to 24 thousand a second on an H100, and half an hour of evaluation.
    assert 1.0 < lora.gpu_hours < 3.0
    assert sized(epochs=4).gpu_hours > 1.5 * lora.gpu_hours
    whole = sized(adapter="full")
    assert (whole.job_class, whole.gpus) == ("full", (4,))
    assert whole.checkpoints_gib > 50 * lora.checkpoints_gib
    large = sized(model="Llama-3.1-70B-Instruct")
    assert large.job_class == "large"
    with pytest.raises(InvalidRequest, match="model 'gpt-9' is unknown; use one of llama"):
        sized(model="gpt-9")
    with pytest.raises(InvalidRequest, match=r"kind 'm': "):
        sized(model="qwen2.5-72b", adapter="full", gpus=1)


def test_submissions_have_the_shares_the_tiers_and_the_hours_of_the_mix() -> None:
    mix = job_mix.load()
    kinds = kind_sizes.sized(mix, [POOL])
    jobs = submissions(mix, kinds, seed=3, days=20.0)
    assert len(jobs) == pytest.approx(10_000, rel=0.05)
    for kind in kinds:
        of_kind = [job for job in jobs if job.kind == kind.name]
        assert len(of_kind) / len(jobs) == pytest.approx(kind.share, rel=0.25)
        assert {job.num_gpus for job in of_kind} == set(kind.gpus)
    hours = sum(job.num_gpus * job.duration_s for job in jobs) / 3600 / len(jobs)
    assert hours == pytest.approx(10.27, rel=0.25)
    at_noon = sum(9 <= job.submit_s % 86400 / 3600 < 15 for job in jobs)
    assert at_noon > 3 * sum(job.submit_s % 86400 / 3600 < 3 or job.submit_s % 86400 / 3600 >= 21 for job in jobs)
    assert {job.tier for job in jobs if job.job_class != "lora"} == {"premium"}
    assert not any(job.spot for job in jobs if job.tier == "premium")
    assert jobs == submissions(mix, kinds, seed=3, days=20.0)
