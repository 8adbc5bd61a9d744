"""The areas that are mutated, and the tests that must notice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PLANTED = "planted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Modules and tests, as globs relative to the repository's root."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]

    def sources(self, root: Path) -> list[Path]:
        """Paths of the modules, relative to `root`."""
        return _found(root, self.modules)


AREAS = (
    Area(
        name="policy",
        modules=("engine/scheduler/*.py",),
        tests=("tests/engine/scheduler/test_*.py",),
    ),
    Area(
        name="money",
        modules=(
            "control_plane/billing/rules.py", "control_plane/billing/prices.py", "control_plane/billing/invoices/rules.py",
            "control_plane/billing/invoices/service.py", "control_plane/billing/metering/rules.py",
            "control_plane/billing/metering/service.py", "control_plane/billing/usage/rules.py",
            "control_plane/billing/usage/usage_lines.py", "control_plane/billing/ledger.py", "control_plane/billing/refunds.py",
            "control_plane/billing/budgets.py", "control_plane/billing/storage_usage.py",
        ),
        tests=(
            "tests/control_plane/billing/test_rules.py", "tests/control_plane/billing/test_billing*.py",
            "tests/control_plane/billing/test_prices.py", "tests/control_plane/billing/test_budgets.py",
            "tests/control_plane/billing/test_ledger.py", "tests/control_plane/billing/test_refunds.py",
            "tests/control_plane/billing/test_storage.py", "tests/control_plane/billing/invoices/test_invoices.py",
            "tests/control_plane/billing/metering/test_rules.py", "tests/control_plane/billing/metering/test_metering.py",
            "tests/control_plane/billing/metering/test_stops_billed.py", "tests/control_plane/billing/usage/test_rules.py",
            "tests/control_plane/billing/usage/test_usage.py",
        ),
    ),
    Area(
        name="checkpoints",
        modules=("engine/training/checkpoints.py", "core/durable_files.py", "engine/training/runtime/checkpoint_writer.py"),
        tests=(
            "tests/engine/training/test_checkpoint*.py", "tests/engine/training/runtime/test_saving.py",
            "tests/engine/training/runtime/test_resume.py",
        ),
    ),
    Area(
        name="gates",
        modules=(
            "engine/evals/scoring/controls.py", "engine/evals/scoring/scores.py", "engine/evals/scoring/significance.py",
            "engine/evals/scoring/judge.py", "engine/evals/suites/answer_metrics.py", "engine/evals/gate/gates.py",
        ),
        tests=(
            "tests/engine/evals/gate/test_controls.py", "tests/engine/evals/gate/test_gates.py",
            "tests/engine/evals/gate/test_preference_rules.py",
            "tests/engine/evals/gate/test_planted_replies.py", "tests/engine/evals/gate/test_report.py",
            "tests/engine/evals/scoring/test_metrics.py", "tests/engine/evals/scoring/test_judge.py",
            "tests/engine/evals/scoring/test_preferences.py", "tests/engine/evals/scoring/test_significance.py",
        ),
    ),
    Area(
        name="tokens",
        modules=("engine/data/tokens/*.py", "engine/data/packs/*.py"),
        tests=(
            "tests/engine/data/tokens/test_long_rows.py", "tests/engine/data/tokens/test_templates*.py",
            "tests/engine/data/tokens/test_tokens.py", "tests/engine/data/packs/test_pack*.py",
        ),
    ),
    Area(
        name="quotas",
        modules=(
            "control_plane/quotas/rules.py", "control_plane/quotas/service.py", "control_plane/quotas/enforcement.py",
            "control_plane/tenants/rules.py",
        ),
        tests=(
            "tests/control_plane/quotas/test_rules.py", "tests/control_plane/quotas/test_quotas.py",
            "tests/control_plane/quotas/test_quota.py", "tests/control_plane/quotas/test_hard_cap.py",
            "tests/control_plane/tenants/test_tenants.py", "tests/control_plane/jobs/test_submission.py",
            "tests/sensors/test_quotas_sensor.py",
        ),
    ),
    Area(
        name="inference",
        modules=(
            "resources/inference/engine/*.py", "resources/inference/answers.py", "resources/inference/call_stream.py",
            "resources/inference/loaded_adapters.py", "resources/inference/logprobs.py", "resources/inference/request_fields.py",
            "resources/inference/tool_requests.py",
        ),
        tests=(
            "tests/resources/inference/test_stop_strings.py", "tests/resources/inference/test_fair_turns.py",
            "tests/resources/inference/test_call_stream.py", "tests/resources/inference/test_inference*.py",
            "tests/resources/inference/test_request_fields.py",
        ),
    ),
    Area(
        name="serving",
        modules=("control_plane/serving/*.py", "control_plane/serving/responses/*.py", "engine/adapters/rollout_plan.py"),
        tests=(
            "tests/control_plane/serving/test_model_routes.py", "tests/control_plane/serving/test_own_servers.py",
            "tests/control_plane/serving/test_request_limits.py", "tests/control_plane/serving/test_responses.py",
            "tests/control_plane/serving/test_rollout*.py", "tests/control_plane/serving/test_served_index.py",
            "tests/control_plane/serving/test_gateway.py", "tests/control_plane/serving/test_streams_and_gateway.py",
            "tests/control_plane/serving/test_structured_answers.py", "tests/control_plane/serving/test_tools.py",
        ),
    ),
    Area(
        name="agent",
        modules=("agent/*.py", "agent/uploads/*.py"),
        tests=(
            "tests/agent/test_*.py", "tests/agent/uploads/test_*.py", "tests/control_plane/attempts/test_agent_faults.py",
            "tests/control_plane/attempts/test_training_follow.py", "tests/control_plane/attempts/test_sharded_checkpoints.py",
        ),
    ),
    Area(
        name="launchers",
        modules=("resources/launcher/*.py",),
        tests=("tests/resources/launcher/test_*.py",),
    ),
    Area(
        name="erasure",
        modules=("control_plane/tenant_data/*.py", "control_plane/evaluations/answer_cache.py"),
        tests=("tests/control_plane/tenant_data/test_*.py",),
    ),
    Area(
        name="console",
        modules=(
            "control_plane/console/*.py", "control_plane/console/documents/*.py", "control_plane/console/pages/*.py",
            "control_plane/console/pages/account/*.py", "control_plane/console/pages/models/*.py",
            "control_plane/console/pages/operators/*.py",
        ),
        tests=(
            "tests/control_plane/console/test_*.py", "tests/control_plane/console/documents/test_*.py",
            "tests/control_plane/console/pages/test_*.py",
        ),
    ),
    Area(
        name="attempts",
        modules=("control_plane/attempts/*.py", "control_plane/attempts/exports/*.py", "control_plane/attempts/inputs/*.py"),
        tests=(
            "tests/control_plane/attempts/test_agent_faults.py", "tests/control_plane/attempts/test_attempt*.py",
            "tests/control_plane/attempts/test_checkpoint_retention.py", "tests/control_plane/attempts/test_fencing.py",
            "tests/control_plane/attempts/test_gang*.py", "tests/control_plane/attempts/test_health.py",
            "tests/control_plane/attempts/test_preemption.py", "tests/control_plane/attempts/test_rules.py",
            "tests/control_plane/attempts/test_training_follow.py",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """A defect planted by somebody who had not read the tests."""

    name: str
    path: str
    before: str
    """Stands in the file exactly once."""
    after: str
    tests: tuple[str, ...]


def planted() -> list[Defect]:
    """The defects of ``planted.json``, each with the tests of its group."""
    groups = json.loads((HERE / "planted.json").read_text())
    return [
        Defect(name=name, path=path, before=before, after=after, tests=tuple(group["tests"]))
        for group in groups
        for name, path, before, after in group["defects"]
    ]


def likeliest_first(root: Path, globs: Sequence[str], *, of: str) -> list[str]:
    """The files, relative to `root`; those named like the module `of` or its package first, since they are the likeliest to fail."""
    module = Path(of)
    files = [str(path) for path in _found(root, globs)]
    return sorted(files, key=lambda path: (module.stem not in Path(path).stem, module.parent.name not in path))


def _found(root: Path, globs: Sequence[str]) -> list[Path]:
    found = [path.relative_to(root) for pattern in globs for path in sorted(root.glob(pattern)) if path.name != "__init__.py"]
    missing = [pattern for pattern in globs if not any(root.glob(pattern))]
    if missing:
        raise FileNotFoundError(f"nothing matches {missing} in {root}; correct the area in benchmarks/mutation")
    return list(dict.fromkeys(found))
