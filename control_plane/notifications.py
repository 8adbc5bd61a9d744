"""What tenants can be told of outside of the API: kinds of events, as webhooks and e-mails carry them.

Types are stable, and OpenAI's where it has one. The data of an event names the object, under ``id``, and its new state; it holds
no text that the tenant uploaded: receivers fetch what they need with a key of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

EVENT_TYPES: Mapping[str, str] = {
    "fine_tuning.job.queued": "the job was admitted and waits for GPUs, also after a preemption",
    "fine_tuning.job.running": "training began, or went on",
    "fine_tuning.job.evaluating": "training is done; the adapter is being evaluated",
    "fine_tuning.job.paused": "the job was paused, by its tenant or because a cap was reached",
    "fine_tuning.job.preempted": "the job gave its GPUs to another; it goes on from its checkpoint",
    "fine_tuning.job.succeeded": "the job has ended well",
    "fine_tuning.job.failed": "the job has failed; its error says why",
    "fine_tuning.job.cancelled": "the job was cancelled",
    "file.processed": "a file was validated; its dataset version exists",
    "file.refused": "a file cannot be trained on; its report says why",
    "adapter.promoted": "an adapter went into production",
    "adapter.quarantined": "an adapter did not pass its gates; it is kept, and not served",
    "adapter.approval_pending": "an adapter waits for a person's approval",
    "adapter.deprecated": "an adapter is no longer served, and will be deleted after its days of grace",
    "quota.threshold_reached": "GPU time of this month has reached a share of a cap",
    "quota.hard_cap_reached": "the hard cap is reached: running jobs are paused at their next checkpoint",
    "budget.threshold_reached": "what was spent this month has reached a threshold of a budget",
    "refund.decided": "an operator has decided on a refund",
    "invoice.issued": "the invoice of a month is issued",
    "webhook_endpoint.disabled": "an endpoint has failed for so long that nothing is sent to it any more",
}
"""By type: what has happened."""
