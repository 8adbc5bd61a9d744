"""What a sweep tries, how it stands, and which trial is best."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.jobs.sweeps.rules import MAX_TRIALS, Settings, SweepStatus, Trial, best, status_of
from control_plane.platform.job_states import JobState
from core.errors import InvalidRequest

S = JobState


def settings(**fields: Any) -> Settings:
    return Settings.from_body({"parameters": {"rank": [8, 16], "learning_rate": [1e-4, 2e-4, 4e-4]}, **fields}, drawn_seed=5)


def trial(number: int, state: JobState | None, value: float | None = None, *, refused: bool = False) -> Trial:
    return Trial(number=number, state=state, refused=refused, value=value)


def test_a_grid_is_every_combination_once() -> None:
    trials = settings().trials()
    assert trials[:2] == [{"rank": 8, "learning_rate": 1e-4}, {"rank": 8, "learning_rate": 2e-4}]
    assert len({str(t) for t in trials}) == len(trials) == 6


def test_a_random_sweep_over_lists_draws_without_replacement_and_ends_when_all_are_drawn() -> None:
    some = settings(strategy="random", max_jobs=4, seed=1).trials()
    assert len({str(t) for t in some}) == len(some) == 4
    assert len(settings(strategy="random", max_jobs=50, seed=1).trials()) == 6


def test_the_same_seed_draws_the_same_trials_and_another_one_others() -> None:
    asked = {"strategy": "random", "max_jobs": 8, "parameters": {"learning_rate": {"min": 1e-5, "max": 1e-3, "scale": "log"}}}
    one, again, other = (Settings.from_body({**asked, "seed": s}, drawn_seed=0).trials() for s in (1, 1, 2))
    assert one == again != other


def test_a_range_is_drawn_from_within_its_ends_and_on_its_scale() -> None:
    wide = {"learning_rate": {"min": 1e-5, "max": 1e-3, "scale": "log"}, "n_epochs": {"min": 1, "max": 3}}
    trials = Settings.from_body({"strategy": "random", "max_jobs": 100, "parameters": wide}, drawn_seed=3).trials()
    rates = [t["learning_rate"] for t in trials]
    assert len(trials) == 100
    assert all(1e-5 <= r <= 1e-3 for r in rates)
    assert 30 < sum(r < 1e-4 for r in rates) < 70, "half of the draws lie below the geometric middle"
    assert {t["n_epochs"] for t in trials} == {1, 2, 3}


def test_a_narrow_range_of_whole_numbers_gives_what_it_has() -> None:
    narrow = {"strategy": "random", "max_jobs": 20, "parameters": {"n_epochs": {"min": 1, "max": 3}}}
    assert sorted(t["n_epochs"] for t in Settings.from_body(narrow, drawn_seed=0).trials()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"strategy": "bayes"}, "sweep.strategy"),
        ({"colour": 1}, "sweep.colour"),
        ({"parameters": {}}, "sweep.parameters"),
        ({"parameters": {"rank": 8}}, "sweep.parameters.rank"),
        ({"parameters": {"rank": []}}, "sweep.parameters.rank"),
        ({"parameters": {"rank": [8, 8]}}, "sweep.parameters.rank"),
        ({"parameters": {"rank": {"min": 8, "max": 16}}}, "sweep.parameters.rank"),
        ({"strategy": "random", "max_jobs": 3, "parameters": {"rank": {"min": 16, "max": 8}}}, "sweep.parameters.rank"),
        ({"strategy": "random", "max_jobs": 3, "parameters": {"rank": {"min": 0, "max": 8, "scale": "log"}}}, "sweep.parameters.rank"),
        ({"strategy": "random"}, "sweep.max_jobs"),
        ({"max_jobs": 5}, "sweep.max_jobs"),
        ({"max_jobs": MAX_TRIALS + 1}, "sweep.max_jobs"),
        ({"parameters": {"learning_rate": list(range(1, 80)), "rank": [8, 16]}}, "sweep.max_jobs"),
        ({"seed": -1}, "sweep.seed"),
        ({"metric": "speed"}, "sweep.metric"),
        ({"metric": "holdout/exact_match"}, "sweep.goal"),
        ({"goal": "best"}, "sweep.goal"),
    ],
)
def test_a_sweep_that_cannot_be_done_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        settings(**fields)
    assert (refused.value.code, refused.value.param) == ("invalid_sweep", param)


def test_losses_are_minimized_without_saying_so() -> None:
    assert settings().goal == settings(metric="validation/perplexity").goal == "minimize"
    assert settings(metric="holdout/exact_match", goal="maximize").goal == "maximize"


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ((S.SUCCEEDED, None), SweepStatus.RUNNING),
        ((S.FAILED, S.RUNNING), SweepStatus.RUNNING),
        ((S.FAILED, S.SUCCEEDED), SweepStatus.SUCCEEDED),
        ((S.FAILED, S.CANCELLED), SweepStatus.FAILED),
        ((S.CANCELLED, S.CANCELLED), SweepStatus.CANCELLED),
    ],
)
def test_the_status_follows_from_the_trials(states: tuple[JobState | None, ...], status: SweepStatus) -> None:
    trials = [trial(n, s) for n, s in enumerate(states)]
    assert status_of(trials, cancelled=False) is status
    assert status_of(trials, cancelled=True) is SweepStatus.CANCELLED


def test_a_trial_that_was_refused_is_over() -> None:
    assert status_of([trial(0, None, refused=True), trial(1, S.SUCCEEDED)], cancelled=False) is SweepStatus.SUCCEEDED
    assert status_of([trial(0, None, refused=True)], cancelled=False) is SweepStatus.FAILED


def test_the_best_is_of_those_that_succeeded_and_have_a_number() -> None:
    trials = [
        trial(0, S.FAILED, 0.1),
        trial(1, S.SUCCEEDED, 0.4),
        trial(2, S.SUCCEEDED, 0.3),
        trial(3, S.SUCCEEDED, 0.3),
        trial(4, S.SUCCEEDED, None),
        trial(5, S.SUCCEEDED, float("nan")),
        trial(6, S.RUNNING, 0.0),
    ]
    assert (best(trials, "minimize"), best(trials, "maximize")) == (2, 1)
    assert best(trials[:1], "minimize") is None


@pytest.mark.parametrize("values", [[8, 8.0], [None, "auto"], [["q_proj", 1], ["q_proj", 1.0]]])
def test_values_that_train_the_same_are_one_value(values: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        Settings.from_body({"parameters": {"rank": values}}, drawn_seed=1)


def test_draws_that_train_the_same_are_one_trial() -> None:
    body = {"strategy": "random", "max_jobs": 40, "parameters": {"rank": {"min": 1, "max": 4}, "alpha": {"min": 1.0, "max": 1.01}}}
    trials = Settings.from_body(body, drawn_seed=1).trials()
    assert len({(t["rank"], float(t["alpha"])) for t in trials}) == len(trials)
