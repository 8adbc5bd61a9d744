"""Schedules follow the formulas of transformers where it has them, and each reads only its own options."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from core.errors import InvalidRequest
from engine.training import schedules
from engine.training.hyperparameters import OF_EVERY_RECIPE, ModelFacts, PackFacts, plan, resolve
from engine.training.requested_hyperparameters import checked_hyperparameters
from engine.training.schedules import factor
from engine.training.spec import Optimization, TrainingSpec

MODEL = ModelFacts(id="llama-8b", num_parameters=8_030_000_000, context_length=131072, digest="e" * 64)
PACK = PackFacts(fingerprint="pk_1", dataset_id="ds_1", num_examples=1200, num_windows=260, num_tokens=132_000, max_seq_len=4096)
STEPS, WARMUP = 50, 5
OPTIONS_OF: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "constant": {},
    "wsd": {"schedule_decay_ratio": 0.2, "schedule_decay_shape": "1-sqrt"},
    "cosine_with_restarts": {"schedule_cycles": 3},
    "polynomial": {"schedule_power": 2.0},
    "inverse_sqrt": {"schedule_timescale": 8},
}
RISE_AND_FALL = ((0.0, 0.0), (0.1, 1.0), (1.0, 0.0))


def opt(schedule: Any, **changes: Any) -> Optimization:
    given: dict[str, Any] = {
        "learning_rate": 0.01,
        "num_epochs": 1,
        "per_device_batch_size": 1,
        "accumulation_steps": 1,
        "warmup_ratio": 0.1,
    }
    return Optimization(schedule=schedule, **given | OPTIONS_OF.get(str(schedule), {}) | changes)


def course(opt: Optimization, total_steps: int = STEPS) -> list[float]:
    return [factor(opt, step, total_steps=total_steps) for step in range(total_steps + 1)]


def spec(requested: dict[str, Any]) -> TrainingSpec:
    return resolve(plan(requested, MODEL), PACK, seed=1, lock_sha256="0" * 64, commit="c" * 40)


def refusal(requested: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        plan(requested, MODEL)
    assert refused.value.code == "invalid_hyperparameter"
    return refused.value


THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "constant": ("constant_with_warmup", {}),
    "wsd": ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "1-sqrt"}),
    "cosine_with_restarts": ("cosine_with_restarts", {"num_cycles": 3}),
    "polynomial": ("polynomial", {"power": 2.0, "lr_end": 0.0}),
    "inverse_sqrt": ("inverse_sqrt", {"timescale": 8}),
}


def of_transformers(name: str, options: dict[str, Any], *, warmup: int = WARMUP) -> list[float]:
    torch = pytest.importorskip("torch", reason="needs the training environment")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made: Any = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=dict(options))
    return [made.lr_lambdas[0](step) for step in range(STEPS + 1)]


def test_every_named_schedule_is_compared() -> None:
    assert set(THEIRS) == set(OPTIONS_OF) == set(schedules.NAMES)


@pytest.mark.parametrize("name", THEIRS)
def test_a_named_schedule_follows_transformers(name: str) -> None:
    theirs, options = THEIRS[name]
    found = course(opt(name))
    assert found == pytest.approx(of_transformers(theirs, options), abs=1e-12)
    assert len({round(f, 6) for f in found}) > 5, "it moves"
    assert (found[0], max(found)) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_schedules_of_earlier_releases_keep_every_bit(name: str) -> None:
    assert course(opt(name)) == of_transformers(THEIRS[name][0], {})


@pytest.mark.parametrize("shape", schedules.DECAY_SHAPES)
def test_each_shape_of_decay_follows_transformers(shape: str) -> None:
    found = course(opt("wsd", schedule_decay_shape=shape))
    assert found == pytest.approx(of_transformers("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": shape}), abs=1e-12)


def test_inverse_sqrt_without_a_timescale_takes_the_warm_up_as_transformers_does() -> None:
    plain = opt("inverse_sqrt", schedule_timescale=None)
    assert course(plain) == pytest.approx(of_transformers("inverse_sqrt", {}))
    assert course(replace(plain, warmup_ratio=0.0)) == pytest.approx(of_transformers("inverse_sqrt", {}, warmup=0))


@pytest.mark.parametrize("name", [n for n in schedules.FALLING if n != "inverse_sqrt"])
def test_a_falling_schedule_ends_at_min_lr_ratio(name: str) -> None:
    assert course(opt(name))[-1] == pytest.approx(0.0, abs=1e-12)
    found = course(opt(name, min_lr_ratio=0.25))
    assert found[-1] == pytest.approx(0.25)
    assert min(found[WARMUP:]) >= 0.25
    assert max(found) == 1.0


@pytest.mark.parametrize("name", schedules.FALLING)
def test_min_lr_ratio_scales_the_fall_and_does_not_cut_it_off(name: str) -> None:
    plain, floored = course(opt(name)), course(opt(name, min_lr_ratio=0.25))
    assert floored[WARMUP:] == pytest.approx([0.25 + 0.75 * f for f in plain[WARMUP:]])
    assert floored[:WARMUP] == plain[:WARMUP], "the warm-up begins at 0"


def test_cosine_with_min_lr_ratio_follows_transformers() -> None:
    assert course(opt("cosine", min_lr_ratio=0.25))[WARMUP:] == pytest.approx(
        of_transformers("cosine_with_min_lr", {"min_lr_rate": 0.25})[WARMUP:]
    )


def test_a_part_of_a_warm_up_step_counts_as_a_step_as_in_transformers() -> None:
    assert [schedules.warmup_steps(opt("cosine", warmup_ratio=r), total_steps=STEPS) for r in (0.0, 0.01, 0.02, 0.03)] == [0, 1, 1, 2]


def test_inverse_sqrt_falls_towards_min_lr_ratio() -> None:
    floored = opt("inverse_sqrt", min_lr_ratio=0.25)
    assert factor(floored, 10**9, total_steps=10**9) == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("name", [n for n in schedules.NAMES if n != "cosine_with_restarts"])
def test_a_schedule_without_restarts_has_no_jumps(name: str) -> None:
    steps = 1000
    options = {"schedule_timescale": 200} if name == "inverse_sqrt" else {}
    jumps = [abs(b - a) for a, b in pairwise(course(opt(name, **options), steps))]
    assert max(jumps) < 0.011 or (name == "wsd" and max(jumps) < 0.08), "1-sqrt is steepest where it starts"


def test_wsd_is_constant_between_warm_up_and_decay() -> None:
    found = course(opt("wsd"))
    assert found[WARMUP:40] == [1.0] * 35
    assert found[39] == 1.0 and found[41] < 1.0
    assert found[45] == pytest.approx(1 - math.sqrt(0.5))


def test_a_decay_longer_than_what_the_warm_up_leaves_begins_after_it() -> None:
    assert course(opt("wsd", schedule_decay_ratio=1.0, schedule_decay_shape="linear")) == pytest.approx(course(opt("linear")))


def test_restarts_jump_back_to_the_full_rate() -> None:
    found = course(opt("cosine_with_restarts", warmup_ratio=0.0, schedule_cycles=2))
    assert (found[0], found[25], found[50]) == (1.0, 1.0, 0.0)
    assert found[24] < 0.01


@pytest.mark.parametrize("total_steps", [1, 2, 3])
@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_shortest_runs_have_a_rate_at_every_step(name: str, total_steps: int) -> None:
    found = course(opt(name, warmup_ratio=0.0), total_steps)
    assert all(0.0 <= f <= 1.0 for f in found)
    assert found[0] == 1.0


def test_points_are_joined_by_straight_lines() -> None:
    found = course(opt(RISE_AND_FALL))
    assert (found[0], found[5], found[50]) == (0.0, 1.0, 0.0)
    assert found[1] == pytest.approx(0.2)
    assert found[5:] == pytest.approx([(50 - s) / 45 for s in range(5, 51)])


def test_positions_above_1_are_steps() -> None:
    found = course(opt(((10.0, 1.0), (20.0, 0.5), (40.0, 0.25))))
    assert found[:11] == [1.0] * 11, "before the first point its factor holds"
    assert found[15] == pytest.approx(0.75)
    assert found[30] == pytest.approx(0.375)
    assert found[40:] == [0.25] * 11, "after the last point its factor holds"


def test_points_have_no_warm_up_but_their_own() -> None:
    found = spec({"schedule": [[0, 1], [1, 0]]}).optimization
    assert (found.schedule, found.warmup_ratio) == (((0.0, 1.0), (1.0, 0.0)), 0.0)
    assert factor(found, 0, total_steps=10) == 1.0


@pytest.mark.parametrize(
    "points",
    [
        [],
        [[0, 1]],
        [[0, 1], [0, 0.5]],
        [[0.5, 1], [0.2, 0]],
        [[-0.1, 1], [1, 0]],
        [[0, 1.5], [1, 0]],
        [[0, 0], [1, 0]],
        [[0, 1], [0.5, 1], [20, 0]],
        [[0, 1], [1, "0"]],
        [[0, 1], [1, True]],
        [[0, 1], [1, math.nan]],
        [[0, 1], [math.inf, 0]],
        [[0, 1], [1, 0, 0]],
        [0, 1],
        [[n, 1] for n in range(200)],
        {"0": 1},
        7,
    ],
)
def test_a_list_that_is_no_schedule_is_refused_with_an_example_of_one(points: Any) -> None:
    refused = refusal({"schedule": points})
    assert refused.param == "hyperparameters.schedule"
    assert "a list of points such as [[0, 0], [0.1, 1], [1, 0]]" in refused.message


ALIASES = [
    ("warmup_stable_decay", "wsd"),
    ("constant_with_warmup", "constant"),
    ("cosine_with_min_lr", "cosine"),
    ("cosine_with_hard_restarts", "cosine_with_restarts"),
    ("inverse_square_root", "inverse_sqrt"),
]


def test_every_alias_is_compared() -> None:
    assert {alias for alias, _ in ALIASES} == schedules.ALIASES.keys()


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_a_name_of_another_tool_trains_the_same(alias: str, name: str) -> None:
    assert spec({"schedule": alias}).sha256 == spec({"schedule": name}).sha256
    assert spec({"schedule": alias}).optimization.schedule == name


@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_spec_holds_the_options_that_its_schedule_reads_and_no_others(name: str) -> None:
    found = spec({"schedule": name})
    own = {option for option, readers in schedules.OPTIONS.items() if name in readers and option.startswith("schedule_")}
    held = {option for option in schedules.OPTIONS if option.startswith("schedule_") and getattr(found.optimization, option) is not None}
    assert held == own & set(OF_EVERY_RECIPE)
    assert TrainingSpec.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_options_and_points_are_in_the_digest_of_a_resume() -> None:
    asked: list[dict[str, Any]] = [
        {"schedule": "wsd"},
        {"schedule": "wsd", "schedule_decay_ratio": 0.1},
        {"schedule": "wsd", "schedule_decay_shape": "cosine"},
        {"schedule": "cosine_with_restarts", "schedule_cycles": 4},
        {"schedule": "polynomial", "schedule_power": 2},
        {"schedule": "inverse_sqrt", "schedule_timescale": 100},
        {"schedule": [[0, 1], [1, 0]]},
        {"schedule": [[0, 1], [1, 0.5]]},
    ]
    assert len({spec(one).resume_sha256 for one in asked}) == len(asked)
    assert spec({"schedule": [[0, 1], [1, 0]]}).sha256 == spec({"schedule": [[0.0, 1.0], [1.0, 0.0]]}).sha256


VALUES: dict[str, Any] = {
    "warmup_ratio": 0.1, "min_lr_ratio": 0.1, "schedule_decay_ratio": 0.1, "schedule_decay_shape": "linear", "schedule_cycles": 3,
    "schedule_power": 2.0, "schedule_timescale": 10,
}  # fmt: skip


@pytest.mark.parametrize("option", schedules.OPTIONS)
@pytest.mark.parametrize("schedule", [*schedules.NAMES, "points"])
def test_an_option_of_another_schedule_is_refused_by_name(schedule: str, option: str) -> None:
    requested = {option: VALUES[option], "schedule": [[0, 1], [1, 0]] if schedule == "points" else schedule}
    if schedule in schedules.OPTIONS[option]:
        assert getattr(spec(requested).optimization, option) == VALUES[option]
    else:
        refused = refusal(requested)
        assert refused.param == f"hyperparameters.{option}"
        assert f"{option} has no effect with schedule {schedule}; use " in refused.message


def test_an_option_is_refused_with_the_recipes_own_schedule_too() -> None:
    assert "no effect with schedule cosine; use wsd" in refusal({"schedule_decay_ratio": 0.1}).message


def test_warm_up_and_decay_longer_than_the_run_are_refused() -> None:
    refused = refusal({"schedule": "wsd", "warmup_ratio": 0.3, "schedule_decay_ratio": 0.8})
    assert "are more than the run" in refused.message
    assert spec({"schedule": "wsd", "warmup_ratio": 0.2, "schedule_decay_ratio": 0.8}).optimization.schedule_decay_ratio == 0.8


@pytest.mark.parametrize(
    ("requested", "suggested"),
    [
        ({"schedule": "polynomal"}, "; change it, or leave it out for the recipe's default; did you mean polynomial?"),
        ({"schedule": "Cosine"}, "did you mean cosine"),
        ({"schedule": "warmup-stable-decay"}, "did you mean warmup_stable_decay?"),
        ({"optimizer": "adamw_tourch"}, "did you mean adamw_torch"),
        ({"optimizer": "adamw_8bits"}, "did you mean adamw_8bit"),
        ({"attention": "flash_attention"}, "did you mean flash_attention_2"),
        ({"target_modules": ["q_proj", "kproj"]}, "did you mean k_proj"),
        ({"learning_rte": 1}, "did you mean learning_rate"),
        ({"max_seq_length": 1}, "did you mean max_seq_len?"),
        ({"num_train_epochs": 1}, "did you mean n_epochs"),
        ({"lr_scheduler_type": "cosine"}, "did you mean schedule"),
        ({"lora_dropout": 0.1}, "did you mean dropout"),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(requested: dict[str, Any], suggested: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_hyperparameters(requested)
    assert suggested in refused.value.message
    assert refused.value.param == f"hyperparameters.{next(iter(requested))}"


def test_an_unknown_name_is_refused_in_one_line_and_not_with_every_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_hyperparameters({"zzz": 1})
    assert refused.value.message == "hyperparameter 'zzz' does not exist; GET /v1/fine_tuning/model_limits lists all"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("cosine", "0.01, 5 steps of warm-up, then cosine to 0"),
        ("wsd", "0.01, 5 steps of warm-up, then constant, and 1-sqrt to 0 in the last 10 steps"),
        ("cosine_with_restarts", "0.01, 5 steps of warm-up, then 3 cosines to 0"),
        ("polynomial", "0.01, 5 steps of warm-up, then polynomial of power 2 to 0"),
        ("inverse_sqrt", "0.01, 5 steps of warm-up, then inverse square root towards 0"),
        ("constant", "0.01, 5 steps of warm-up, then constant"),
        (RISE_AND_FALL, "0.01, times 0 at 0, 1 at 0.1, 0 at 1 (of the run)"),
    ],
)
def test_a_schedule_is_described_with_its_steps(schedule: Any, words: str) -> None:
    assert schedules.describe_schedule(opt(schedule), total_steps=STEPS) == words
