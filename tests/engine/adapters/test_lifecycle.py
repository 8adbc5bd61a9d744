"""Records, stages, promotion and rollout: the pure rules of an adapter's life."""

from dataclasses import asdict, replace
from datetime import UTC, datetime

import pytest

from control_plane.platform.records import record
from core.errors import Conflict, LineageIncomplete
from engine.adapters import promotion_rules, rollout_plan
from engine.adapters.record import FULL_MODEL, LORA_ADAPTER, AdapterRecord, check_complete, make_adapter_name, parse_adapter_name
from engine.adapters.rollout_plan import DesiredAdapter, RolloutAction
from engine.adapters.servability import Refusal
from engine.adapters.stages import STAGE_TRANSITIONS, Stage, check_transition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RECORD = AdapterRecord(
    id="adp-1", tenant_id="acme", name="ft:tiny:acme:support:abc", type=LORA_ADAPTER, base_model="tiny", base_digest="b" * 64,
    job_id="ftjob-1",
    dataset_id="ds_1", pack_fingerprint="p", spec_sha256="s", lock_sha256="l", commit="c", metrics={"holdout/exact_match": 0.8},
    eval_report_key="k", eval_passed=True, rank=8, alpha=16.0, modules=("q_proj",), object_prefix="tenants/acme/adapters/adp-1",
    manifest_sha256="m", stage=Stage.DRAFT, created_at=NOW, promoted_at=None,
)  # fmt: skip


def test_a_complete_record_is_let_through_and_survives_its_row() -> None:
    assert check_complete(RECORD) is RECORD
    assert record(AdapterRecord, asdict(RECORD) | {"stage": "draft", "modules": ["q_proj"]}) == RECORD


@pytest.mark.parametrize(
    "field", ["base_digest", "dataset_id", "pack_fingerprint", "spec_sha256", "lock_sha256", "commit", "manifest_sha256"]
)
@pytest.mark.parametrize("gap", [None, ""])
def test_a_gap_in_the_lineage_is_named_and_refused(field: str, gap: str | None) -> None:
    with pytest.raises(LineageIncomplete, match=rf"without: {field};"):
        check_complete(replace(RECORD, **{field: gap}))  # type: ignore[arg-type]


def test_all_gaps_are_named_at_once() -> None:
    with pytest.raises(LineageIncomplete, match="without: dataset_id, commit, metrics, modules;"):
        check_complete(replace(RECORD, dataset_id="", commit="", metrics={}, modules=()))


def test_a_full_model_has_no_rank() -> None:
    full = replace(RECORD, type=FULL_MODEL, rank=None, alpha=None, modules=())
    assert check_complete(full) is full
    with pytest.raises(LineageIncomplete, match="rank"):
        check_complete(replace(full, type=LORA_ADAPTER))


@pytest.mark.parametrize("base", ["demo-llama-3m", "meta/Llama:8b"])
@pytest.mark.parametrize(("suffix", "safe"), [("My Bot!", "my-bot"), (None, ""), ("a:b/../c", "a-b-c"), ("x" * 99, "x" * 64)])
def test_a_name_survives_being_parsed_whatever_the_user_calls_it(base: str, suffix: str | None, safe: str) -> None:
    name = make_adapter_name(base, "acme", suffix, "0a1b")
    assert parse_adapter_name(str(name)) == name
    assert name.suffix == safe
    assert str(name).startswith(f"{name.logical}:")


@pytest.mark.parametrize("no_name", ["", "demo", "ft:a:b", "xx:a:b:c:d"])
def test_other_text_is_no_adapter_name(no_name: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        parse_adapter_name(no_name)


def test_every_stage_has_its_moves_and_only_the_archive_is_final() -> None:
    assert set(STAGE_TRANSITIONS) == set(Stage)
    assert [s for s, targets in STAGE_TRANSITIONS.items() if not targets] == [Stage.ARCHIVED]


def test_a_quarantined_adapter_cannot_go_to_production() -> None:
    with pytest.raises(Conflict, match="adp-1 is quarantined and cannot become production; legal next stages: archived"):
        check_transition("adp-1", Stage.QUARANTINED, Stage.PRODUCTION)


def test_a_production_adapter_becomes_a_draft_again_only_by_a_release() -> None:
    released = {Stage.QUARANTINED: {Stage.DRAFT}}
    reachable: set[Stage] = set()
    todo = [Stage.PRODUCTION]
    while todo:
        stage = todo.pop()
        found = STAGE_TRANSITIONS[stage] - released.get(stage, set())
        todo += [s for s in found if s not in reachable]
        reachable |= found
    assert Stage.DRAFT not in reachable


def candidate(**changes: object) -> promotion_rules.PromotionCandidate:
    files = changes.pop("files", ())
    package = changes.pop("package", ())
    served = changes.pop("served", RECORD.base_digest)
    catalogue = changes.pop("catalogue", RECORD.base_digest)
    record = replace(RECORD, **changes)  # type: ignore[arg-type]
    return promotion_rules.PromotionCandidate(
        record=record,
        served_digests=[served],
        from_servers=True,
        accepted_digests={record.base_digest},
        catalogue_digest=catalogue,
        file_refusals=[*files, *package],
    )  # type: ignore[arg-type]


TORN, DORA = Refusal(code="manifest_mismatch", detail="x"), Refusal(code="unsupported_feature", detail="DoRA")


@pytest.mark.parametrize(
    ("made", "codes"),
    [
        pytest.param(candidate(), [], id="a passed draft may go"),
        pytest.param(candidate(stage=Stage.PRODUCTION), [], id="it may go twice"),
        pytest.param(candidate(stage=Stage.DEPRECATED), [], id="it may come back in its grace"),
        pytest.param(candidate(stage=Stage.QUARANTINED, eval_passed=False), ["gate_failed"], id="quarantined"),
        pytest.param(candidate(stage=Stage.ARCHIVED), ["stage"], id="archived"),
        pytest.param(candidate(served="other"), ["base_digest_mismatch"], id="the base has changed"),
        pytest.param(candidate(catalogue="other"), ["base_digest_mismatch"], id="the base was updated and servers do not have it yet"),
        pytest.param(candidate(files=(TORN,), package=(DORA,)), ["manifest_mismatch", "unsupported_feature"], id="files"),
        pytest.param(
            candidate(eval_passed=False, served="other", package=(DORA,)),
            ["gate_failed", "base_digest_mismatch", "unsupported_feature"],
            id="all at once",
        ),
    ],
)
def test_promotion_names_every_refusal(made: promotion_rules.PromotionCandidate, codes: list[str]) -> None:
    assert [r.code for r in promotion_rules.promotion_refusals(made)] == codes


def want(name: str, *, loaded: bool = True, refused: bool = False, accepted: bool = True) -> DesiredAdapter:
    return DesiredAdapter(name=name, loaded=loaded, directory=f"/a/{name}", refused=refused, proven=True, accepted=accepted)


@pytest.mark.parametrize(
    ("desired", "served", "actions"),
    [
        pytest.param([want("ft:a")], {"ft:a": "/a/ft:a"}, [], id="nothing to do"),
        pytest.param([want("ft:a")], {}, [("load", "ft:a")], id="a server that forgot is told again"),
        pytest.param([want("ft:a", refused=True)], {}, [], id="what was refused for good is left alone"),
        pytest.param([want("ft:a", loaded=False)], {"ft:a": "/a/ft:a"}, [("unload", "ft:a")], id="no longer desired"),
        pytest.param([want("ft:a", loaded=False)], {}, [], id="gone already"),
        pytest.param([want("ft:a")], {"ft:a": "/old"}, [("unload", "ft:a"), ("load", "ft:a")], id="another directory"),
        pytest.param([want("ft:a", accepted=False)], {"ft:a": "/a/ft:a"}, [("unload", "ft:a")], id="not accepted any more"),
        pytest.param([want("ft:a", accepted=False)], {"ft:a": "/old"}, [("unload", "ft:a")], id="not accepted, from another directory"),
        pytest.param([], {"ft:x": "/x", "mine": "/m"}, [("unload", "ft:x")], id="unknown ft names go, others stay"),
        pytest.param(
            [want("ft:b", loaded=False), want("ft:c"), want("ft:a")],
            {"ft:b": "/a/ft:b"},
            [("load", "ft:a"), ("load", "ft:c"), ("unload", "ft:b")],
            id="loads come before unloads",
        ),
    ],
)
def test_reconcile(desired: list[DesiredAdapter], served: dict[str, str], actions: list[tuple[str, str]]) -> None:
    assert [(a.kind, a.name) for a in rollout_plan.plan_rollout(desired, served, now=0.0)] == actions


def test_carrying_out_the_actions_leads_to_nothing_left_to_do() -> None:
    desired = [want("ft:a"), want("ft:b", loaded=False), want("ft:c")]
    served = {"ft:b": "/a/ft:b", "ft:c": "/old", "ft:x": "/x"}
    actions: list[RolloutAction] = rollout_plan.plan_rollout(desired, served, now=0.0)
    assert len(actions) == 5
    for action in actions:
        if action.kind == "load":
            assert action.name not in served
            served[action.name] = f"/a/{action.name}"
        else:
            del served[action.name]
    assert rollout_plan.plan_rollout(desired, served, now=0.0) == []
