"""Types of events that webhooks and e-mails report. They are stable, and OpenAI's where it has one."""

from __future__ import annotations

from collections.abc import Mapping

EVENT_TYPES: Mapping[str, str] = {
    "fine_tuning.job.queued": "the job was admitted and waits for GPUs, also after a preemption",
    "fine_tuning.job.running": "training started or resumed",
    "fine_tuning.job.evaluating": "training is done; the adapter is being evaluated",
    "fine_tuning.job.paused": "the job was paused, by its tenant or because a cap was reached",
    "fine_tuning.job.preempted": "the job gave its GPUs to another job; it resumes from its checkpoint",
    "fine_tuning.job.succeeded": "the job succeeded",
    "fine_tuning.job.failed": "the job failed; its error states the reason",
    "fine_tuning.job.cancelled": "the job was cancelled",
    "file.processed": "a file was validated; its dataset version exists",
    "file.refused": "a file was refused; its report states the reason",
    "adapter.promoted": "an adapter was promoted to production",
    "adapter.quarantined": "a model was trained and is not approved: it did not pass its gate; it is kept but not served",
    "adapter.released": "a model that did not pass its gate was released by a person",
    "adapter.approval_pending": "an adapter awaits approval",
    "adapter.rolled_back": "an adapter was withdrawn from production in favour of the one before it",
    "adapter.deprecated": "an adapter is no longer served, and is deleted after its grace period",
    "quota.threshold_reached": "this month's GPU time has reached a threshold of a limit",
    "quota.hard_cap_reached": "the hard cap is reached: running jobs are paused at their next checkpoint",
    "budget.threshold_reached": "this month's spending has reached a threshold of a budget",
    "refund.decided": "an operator granted or refused a refund",
    "invoice.issued": "a month's invoice was issued",
    "webhook_endpoint.disabled": "an endpoint was disabled after failing for too long",
}
"""Meaning of each type."""
