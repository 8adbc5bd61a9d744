"""The platform's metrics in Prometheus' text format. Names carry their unit; only tenants, and jobs that hold GPUs, have
their own series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from control_plane.api.metrics.gauges import Gauges, LiveJob, Notices, RecentGauges, Totals
from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.platform.job_states import JobState
from control_plane.queue.status.metrics import PoolGauges, QueueGauges, TenantGauges

JOB_LABELS = ("job", "tenant", "tier", "model")
OF_A_STEP = {
    "train_loss": ("ft_job_loss", "Training loss of the newest step"),
    "learning_rate": ("ft_job_learning_rate", "Learning rate of the newest step"),
    "grad_norm": ("ft_job_grad_norm", "Gradient norm of the newest step, before clipping"),
    "steps_per_s": ("ft_job_steps_per_second", "Steps per second of the newest step"),
    "tokens_per_s": ("ft_job_tokens_per_second", "Tokens per second of the newest step over all ranks"),
    "mfu": ("ft_job_mfu_ratio", "Model FLOP utilization of the newest step, if the device's peak is known"),
    "memory_bytes": ("ft_job_memory_bytes", "Peak allocated device memory, or resident memory without a GPU"),
    "gpu_utilization": ("ft_job_gpu_utilization_ratio", "GPU utilization at the newest step"),
}
"""Gauges of a live job, taken from its newest metrics event under this name."""
OF_A_VALIDATION = {
    "valid_loss": ("ft_job_validation_loss", "Loss of the newest validation"),
    "valid_perplexity": ("ft_job_validation_perplexity", "Perplexity of the newest validation"),
}
"""The same, taken from its newest validation."""


def registry(recent: RecentGauges, meter: RequestMeter) -> CollectorRegistry:
    """Returns all metrics of one API process: counts of `meter`, and the platform's gauges from `recent`."""
    both = CollectorRegistry(auto_describe=False)
    both.register(meter.registry)
    both.register(_Families(recent))
    return both


@dataclass(frozen=True, slots=True, eq=False)
class _Families:
    recent: RecentGauges

    def collect(self) -> Iterator[Metric]:
        g = self.recent.read()
        states = {(s.value, tier) for s in JobState for tier in {tier for _, tier in g.jobs}}  # includes counts that fell to 0
        yield _gauge("ft_jobs", "Jobs by state and tier", ("state", "tier"), {k: g.jobs.get(k, 0) for k in sorted(states)}.items())
        yield from _of_queue(g.queue)
        yield from _of_pools(g.queue.pools)
        yield from _of_tenants(g.queue.tenants, g.totals)
        doc = "Ended jobs by outcome; failed_by_platform has no other fault"
        yield _counter("ft_jobs_ended", doc, ("tier", "outcome"), sorted(g.totals.outcomes.items()))
        yield from _of_rounds(g.queue)
        yield from _of_jobs(g.live)
        yield _counter("ft_checkpoints_committed", "Checkpoints committed", (), [((), g.checkpoints)])
        yield _counter("ft_alerts", "Job events with a level above info", ("code", "level"), sorted(g.alerts.items()))
        verdicts = sorted(g.verdicts.items())
        yield _counter("ft_health_verdicts_raised", "Health verdicts raised", ("code", "audience"), [(k, n) for k, (n, _) in verdicts])
        yield _gauge("ft_health_verdicts", "Current health verdicts", ("code", "audience"), [(k, n) for k, (_, n) in verdicts])
        yield from _of_notices(g.notices)
        yield from _of_books(g)


def _of_queue(queue: QueueGauges) -> Iterator[Metric]:
    yield _gauge("ft_queue_waiting", "Waiting jobs by tier and reason", ("tier", "reason"), sorted(queue.waiting.items()))
    yield _gauge("ft_queue_waiting_gpus", "GPUs requested by waiting jobs", ("tier",), _by_one(queue.waiting_gpus))
    yield _gauge("ft_queue_oldest_wait_seconds", "Longest wait of a waiting job", ("tier",), _by_one(queue.oldest_wait_s))
    yield _gauge("ft_queue_age_seconds", "Wait of all waiting jobs", ("tier", "quantile"), _by_quantile(queue.ages_s))
    doc = "Time from queue to GPUs of jobs placed within the last hour"
    yield _gauge("ft_queue_wait_seconds", doc, ("tier", "quantile"), _by_quantile(queue.waits_s))
    doc = "Jobs waiting for their first start longer than their tier promises"
    yield _gauge("ft_sla_waiting", doc, ("tier",), _by_one(queue.promised_waiting))
    yield _counter("ft_sla_missed", "Jobs that started later than their tier promises", ("tier",), _by_one(queue.promised_late))
    yield _counter("ft_sla_starts", "Jobs that started in a tier that promises a start", ("tier",), _by_one(queue.promised_starts))


def _of_pools(pools: Mapping[str, PoolGauges]) -> Iterator[Metric]:
    named = sorted(pools.items())
    yield _gauge("ft_pool_gpus", "GPU slots on ready nodes", ("pool",), [((p,), g.gpus) for p, g in named])
    yield _gauge("ft_pool_gpus_used", "Reserved GPU slots on ready nodes", ("pool",), [((p,), g.used) for p, g in named])
    yield _gauge("ft_pool_gpus_free", "Free GPU slots on ready nodes", ("pool",), [((p,), g.free) for p, g in named])
    largest = [((p,), g.largest_free) for p, g in named]
    yield _gauge("ft_pool_gpus_largest_free", "Largest number of free GPU slots on one node", ("pool",), largest)
    apart = [((p,), g.unusable) for p, g in named]
    yield _gauge(
        "ft_pool_gpus_unusable", "Free GPU slots that the widest waiting job cannot use because they are scattered", ("pool",), apart
    )
    draining = [((p,), g.draining) for p, g in named]
    yield _gauge("ft_pool_gpus_draining", "GPU slots that jobs hold on nodes that are not ready", ("pool",), draining)
    states = [((p, state), n) for p, g in named for state, n in g.nodes.items()]
    yield _gauge("ft_pool_nodes", "Nodes by state: ready, draining, drained", ("pool", "state"), states)
    yield _gauge("ft_pool_nodes_sick", "Nodes that the platform drained", ("pool",), [((p,), g.sick_nodes) for p, g in named])
    unread = [((p,), g.unmonitored_nodes) for p, g in named]
    yield _gauge("ft_pool_nodes_unmonitored", "Nodes without metrics of their GPUs for 5 minutes", ("pool",), unread)


def _of_tenants(tenants: Mapping[str, TenantGauges], totals: Totals) -> Iterator[Metric]:
    named, billed = sorted(tenants.items()), sorted(totals.billed.items())
    by = ("tenant",)
    yield _gauge("ft_tenant_gpus_used", "Reserved GPU slots of a tenant", by, [((t,), g.used_gpus) for t, g in named])
    yield _gauge("ft_tenant_queue_waiting_gpus", "GPUs requested by its waiting jobs", by, [((t,), g.waiting_gpus) for t, g in named])
    oldest = [((t,), g.oldest_wait_s) for t, g in named if g.oldest_wait_s is not None]
    yield _gauge("ft_tenant_queue_oldest_wait_seconds", "Longest wait of its waiting jobs", by, oldest)
    waits = _by_quantile({(t, q): s for t, g in named for q, s in g.waits_s.items()})
    doc = "Time from queue to GPUs of its jobs placed within the last hour"
    yield _gauge("ft_tenant_queue_wait_seconds", doc, ("tenant", "quantile"), waits)
    yield _gauge("ft_tenant_jobs_ended", "Ended jobs by state", ("tenant", "state"), sorted(totals.ended.items()))
    yield _gauge("ft_tenant_billed_gpu_seconds", "GPU seconds billed, less refunds", by, [((t,), s) for t, (s, _) in billed])
    yield _gauge("ft_tenant_billed_micros", "Micro-dollars billed, less refunds", by, [((t,), m) for t, (_, m) in billed])


def _of_rounds(queue: QueueGauges) -> Iterator[Metric]:
    last = queue.round
    age = [] if queue.round_age_s is None else [((), queue.round_age_s)]
    yield _gauge("ft_scheduler_last_round_age_seconds", "Time since the last scheduling cycle", (), age)
    took = [] if last.round_s is None else [((), last.round_s)]
    yield _gauge("ft_scheduler_round_seconds", "Duration of the last scheduling cycle", (), took)
    yield _counter("ft_scheduler_rounds", "Scheduling cycles", (), [((), last.rounds)])
    yield _counter("ft_scheduler_starts", "Jobs started by the scheduler", (), [((), last.starts)])
    yield _counter("ft_scheduler_backfills", "Starts that overtook a reservation without delaying it", (), [((), last.backfills)])
    yield _counter("ft_scheduler_preemptions", "Jobs asked to stop for another job", (), [((), last.preemptions)])
    yield _counter("ft_scheduler_reservations", "Reservations made for waiting jobs", (), [((), last.promises)])
    yield _counter("ft_scheduler_reservations_slipped", "Reservations missed for any reason", (), [((), last.slipped)])
    yield _counter(
        "ft_lost_gpu_seconds", "GPU seconds of work after the last checkpoint that had to be repeated", (), [((), queue.lost_gpu_s)]
    )
    doc = "Reservations whose workload has not started or stopped in time"
    yield _gauge("ft_releases_overdue", doc, ("kind",), _by_one(queue.overdue))


def _by_one(values: Mapping[str, float]) -> list[tuple[tuple[str, ...], float]]:
    return sorted(((name,), value) for name, value in values.items())


def _by_quantile(values: Mapping[tuple[str, float], float]) -> list[tuple[tuple[str, ...], float]]:
    return sorted(((name, f"{q:g}"), value) for (name, q), value in values.items())


def _of_notices(notices: Notices) -> Iterator[Metric]:
    yield _gauge("ft_outbox_events", "Events without a delivery yet", (), [((), notices.outbox)])
    yield _gauge("ft_outbox_oldest_seconds", "Age of the oldest event without a delivery", (), [((), notices.outbox_oldest_s)])
    pending, dead = sorted(notices.pending.items()), sorted(notices.dead.items())
    yield _gauge("ft_deliveries_pending", "Pending deliveries, including retries", ("channel",), [((c,), n) for c, n in pending])
    overdue = [((), notices.overdue_s)]
    yield _gauge("ft_deliveries_overdue_seconds", "Time since the oldest pending delivery was due", (), overdue)
    yield _gauge("ft_deliveries_dead", "Deliveries that were given up", ("channel",), [((c,), n) for c, n in dead])


def _of_books(g: Gauges) -> Iterator[Metric]:
    yield _gauge("ft_ledger_imbalance_micros", "Sum of all postings; zero if the ledger balances", (), [((), g.totals.ledger_imbalance)])
    yield _gauge("ft_refund_cases_pending", "Refund cases that await an operator", (), [((), g.refunds[0])])
    yield _gauge("ft_refund_cases_oldest_seconds", "Age of the oldest pending refund case", (), [((), g.refunds[1])])
    yield _gauge("ft_attempts_unbilled", "Ended attempts that are not billed", (), [((), g.unbilled[0])])
    yield _gauge("ft_attempts_unbilled_oldest_seconds", "Time since the oldest unbilled end was reported", (), [((), g.unbilled[1])])
    yield _gauge("ft_uploads_pending", "Open multipart uploads", (), [((), g.uploads[0])])
    yield _gauge("ft_uploads_expired", "Multipart uploads past their expiry that are not cleaned up", (), [((), g.uploads[1])])
    yield _gauge("ft_quota_held_gpu_seconds", "Expected GPU time of admitted jobs", (), [((), g.quota_held_s)])
    yield _gauge("ft_deletions_pending", "Pending deletions", (), [((), g.deletions[0])])
    yield _gauge("ft_deletions_oldest_seconds", "Age of the oldest pending deletion", (), [((), g.deletions[1])])


def _of_jobs(live: Iterable[LiveJob]) -> Iterator[Metric]:
    labelled = [((j.job_id, j.tenant, j.tier, j.model), j) for j in live]

    def family(name: str, doc: str, values: Iterable[tuple[tuple[str, ...], object]]) -> Metric:
        return _gauge(name, doc, JOB_LABELS, [(labels, v) for labels, v in values if isinstance(v, int | float)])

    yield family("ft_job_attempt", "Number of the job's current attempt", [(k, j.attempt) for k, j in labelled])
    yield family("ft_job_step", "Optimizer steps done", [(k, j.step) for k, j in labelled])
    yield family("ft_job_total_steps", "Optimizer steps in total", [(k, j.total_steps) for k, j in labelled])
    yield family(
        "ft_job_follower_age_seconds",
        "Time since the Dagster step of the job last wrote a heartbeat",
        [(k, j.beat_age_s) for k, j in labelled],
    )
    yield family("ft_job_metrics_age_seconds", "Time since the newest step was reported", [(k, j.newest_age_s) for k, j in labelled])
    for field, (name, doc) in OF_A_STEP.items():
        yield family(name, doc, [(k, j.newest.get(field)) for k, j in labelled])
    for field, (name, doc) in OF_A_VALIDATION.items():
        yield family(name, doc, [(k, j.validation.get(field)) for k, j in labelled])


def _gauge(name: str, doc: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def _counter(name: str, doc: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
