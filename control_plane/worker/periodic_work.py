"""Work that is due at intervals: rounds of steps, each of which finds by itself what there is to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.adapters import adapter_signatures, exports
from control_plane.attempts.checkpoint_retention import retire_ended
from control_plane.billing import budgets, storage_usage
from control_plane.billing.invoices import service as invoices
from control_plane.billing.metering import service as metering
from control_plane.capacity import node_health
from control_plane.datasets import cold_storage, orphaned_objects, validation_tasks
from control_plane.datasets.uploads import multipart_uploads, uploaded_files
from control_plane.jobs import duplicate_requests
from control_plane.jobs.sweeps import service as sweeps
from control_plane.models import mlflow_mirror
from control_plane.notifications import outbox
from control_plane.platform.context import Platform
from control_plane.quotas import enforcement
from control_plane.sandbox import scratch
from control_plane.tenant_data import deletion, deletion_requests
from control_plane.tenants.audit import audit_entries
from control_plane.tracking import wandb_runs
from control_plane.worker import hardware, job_directories, namespaces
from resources.object_store import object_links
from resources.object_store.local import remove_unfinished

QUICK, MAINTENANCE = "quick", "maintenance"
"""Queues of work that takes milliseconds, and of work that may take a minute."""
BUDGET_S = 10.0
"""Time limit of each kind of retention per round, so that none keeps the others from their turn."""

log = logging.getLogger(__name__)

Steps = Mapping[str, Callable[[Platform], object]]
"""What a round does, in this order: a name for what is done, and the function that does it and returns how much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Steps that are run together; one that fails is logged, keeps no other from running, and is tried again in the next round."""

    name: str
    cron: str
    """Minute, hour, day, month, weekday and, if there is a sixth field, second."""
    queue: str
    steps: Steps

    def run(self, platform: Platform) -> str:
        """Run every step and return what became of each."""
        return "; ".join(f"{what}: {self._outcome(what, step, platform)}" for what, step in self.steps.items())

    def _outcome(self, what: str, step: Callable[[Platform], object], platform: Platform) -> str:
        try:
            return str(step(platform))
        except Exception as error:
            log.exception("%s: %s failed", self.name, what)
            return f"failed, {type(error).__name__}: {str(error)[:200]}"


FREQUENT = Round(
    name="frequent", cron="* * * * * */10", queue=QUICK,
    steps={
        "limits enforced": enforcement.enforce,
        "namespaces changed": namespaces.keep,
        "trials submitted": lambda p: ", ".join(sweeps.advance(p)) or "none",
        "adapters and exports signed": adapter_signatures.sign_due,
        "jobs with metrics for W&B": wandb_runs.add_due,
    },
)  # fmt: skip
"""One round for all of these: most find nothing to do, and starting a round costs more than looking."""
HARDWARE = Round(
    name="hardware", cron="* * * * * */30", queue=QUICK,
    steps={
        "nodes drained for errors": hardware.read_errors,
        "nodes drained for failures": lambda p: len(node_health.take_out_failing(p)),
        "jobs with slow GPUs": hardware.report_slow,
        "nodes cordoned": hardware.cordon,
    },
)  # fmt: skip
METERING = Round(
    name="metering", cron="* * * * *", queue=MAINTENANCE,
    steps={
        "attempts billed late": metering.settle_due,
        "tenants whose storage was sampled": storage_usage.sample_due,
        "budget alerts": budgets.alert_due,
        "invoices issued": lambda p: len(invoices.issue_due(p)),
    },
)  # fmt: skip
"""In this order, because an invoice waits for unbilled attempts, and alerts count what was just billed."""
CLEANUP = Round(
    name="cleanup", cron="* * * * *", queue=MAINTENANCE,
    steps={
        "uploads expired": multipart_uploads.tidy,
        "expired files deleted": uploaded_files.delete_expired,
        "objects removed": orphaned_objects.remove_due,
        "old events forgotten": outbox.forget,
        "audit entries chained": audit_entries.chain_due,
        "lost tasks of files added": validation_tasks.add_lost,
        "lost tasks of exports added": exports.add_lost,
        "leftovers removed": lambda p: len(scratch.remove_leftovers(p.settings.work_dir)),
        "unfinished objects removed": lambda p: remove_unfinished(p.objects),
        "links of a killed backup removed": lambda p: object_links.remove_abandoned(p.objects),
    },
)  # fmt: skip
REGISTRY = Round(name="model-registry", cron="* * * * * */30", queue=MAINTENANCE, steps={"registry changes": mlflow_mirror.mirror})
RETENTION = Round(
    name="retention", cron="*/10 * * * *", queue=MAINTENANCE,
    steps={
        "deletions done": lambda p: deletion.carry_out_all(p, budget_s=2 * BUDGET_S),
        "adapters archived": deletion_requests.archive_due,
        "jobs whose checkpoints were removed": lambda p: retire_ended(p, budget_s=BUDGET_S),
        "directories of jobs removed": job_directories.remove_ended,
        "idempotency keys forgotten": duplicate_requests.purge,
        "datasets in cold storage": lambda p: cold_storage.cool_unused(p, budget_s=BUDGET_S),
        "exports expired": exports.expire,
    },
)  # fmt: skip
ROUNDS = (FREQUENT, HARDWARE, METERING, CLEANUP, REGISTRY, RETENTION)
