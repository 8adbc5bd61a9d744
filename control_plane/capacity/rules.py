"""Signs of sick hardware: errors that GPUs report, and failures of attempts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

XID = "DCGM_FI_DEV_XID_ERRORS"
"""The last Xid of a GPU; 0: none since its exporter started."""
REMAPPED = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"
"""Counted over the life of a GPU: one that was repaired by a reset keeps the count, so only a rise is an error."""
COUNTS = {
    REMAPPED: "memory rows with uncorrectable errors",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "a memory row could not be remapped",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "uncorrectable ECC errors since the driver was loaded",
}
METRICS = (XID, *COUNTS)
HARDWARE_XIDS = {
    46: "GPU stopped processing", 48: "double-bit ECC error", 54: "auxiliary power is not connected", 62: "internal microcontroller halted",
    64: "memory row could not be remapped", 74: "NVLink error", 79: "GPU has fallen off the bus", 95: "uncontained memory error",
    109: "context switch timeout", 110: "security fault", 119: "GSP timeout", 120: "GSP error", 136: "link training failed",
    140: "unrecovered ECC error", 143: "GPU could not be initialized", 155: "NVLink software error", 156: "resource retired",
    158: "fatal timeout",
}  # fmt: skip
"""Xids after which NVIDIA's catalog asks to reset the GPU, restart the machine or check its connections at once (RESET_GPU, RESTART_BM,
WORKFLOW_XID_48, WORKFLOW_NVLINK_ERR, CHECK_MECHANICALS): https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. Others
are errors of the application, which is restarted (13, 31, 32, 69, 94), follow from another error (43, 45), or need no action (63)."""
MIN_JOBS = 2
"""Different jobs that must have failed on a node: on 16,384 GPUs, a node of 8 interrupted a job once in 264 days (419 times in 54 days
on 2,048 nodes, The Llama 3 Herd of Models, table 5), so two within a day are no accident."""


def new_errors(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Return the hardware errors in `now` that are not in `before`, in words; both are values by ``GPU/metric``.

    1. Another Xid than before, if it is one of :data:`HARDWARE_XIDS`.
    2. A count that has risen, or is above 0 where none is known. Of :data:`REMAPPED`, only one that has risen.

    A value that falls, because the GPU was reset, is no error, and counts from there.
    """
    return [error for key, value in sorted(now.items()) if (error := _error(key, before.get(key), value))]


def _error(key: str, old: float | None, value: float) -> str | None:
    gpu, metric = key.rsplit("/", 1)
    if metric == XID:
        known = HARDWARE_XIDS.get(int(value))
        return f"{gpu}: Xid {value:.0f}, {known}" if known and value != old else None
    least = (value if metric == REMAPPED else 0.0) if old is None else old
    return f"{gpu}: {COUNTS[metric]} ({value:.0f})" if value > least else None


def suspects(failures: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the nodes on which :data:`MIN_JOBS` different jobs failed, with these jobs; `failures` are job and node.

    A job counts against a node only if all of its failures point to that node: one that fails elsewhere, too, fails for another reason.
    """
    nodes, found = defaultdict[str, set[str]](set), defaultdict[str, list[str]](list)
    for job, node in failures:
        nodes[job].add(node)
    for job in sorted(nodes):
        if len(nodes[job]) == 1:
            found[nodes[job].pop()].append(job)
    return {node: jobs for node, jobs in found.items() if len(jobs) >= MIN_JOBS}
