"""What an agent and the control plane tell each other, as JSON over HTTP; both sides read these records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HEARTBEAT_S = 1.0
"""Least seconds between heartbeats. A request to stop reaches the workload with the answer to one."""
PART_BYTES = 64 << 20
"""Larger files are uploaded in parts of this size: S3's limit of 10,000 parts allows 625 GiB."""
MILESTONE = "evaluation_milestone"
"""Code of a notice with a milestone of an evaluation."""
REFUSED, TIMED_OUT, EXPORT_TIMED_OUT = "refused", "evaluation_timed_out", "export_timed_out"
"""Evidence of an evaluation whose input was refused, and error code of one that had its time: both fail again."""
FENCED = "attempt_released"
"""Error code of every call of an attempt that has lost its reservation: its workload must end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A message for the job's tenant or for operators; it becomes an event of the job."""

    code: str
    level: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the agent has measured so far, for the bill and for the next attempt."""

    last_step: int = 0
    began_at: float | None = None
    """Unix seconds at which the first step began; None before its end."""
    kept_until: float | None = None
    """Unix seconds at which the last step ended that a checkpoint committed by this attempt contains."""
    again_s: float = 0.0
    """Seconds of steps after the newest committed checkpoint."""
    silence_s: float = 0.0
    """Seconds since the training process's last heartbeat."""
    next_s: float = HEARTBEAT_S
    """Seconds to the next heartbeat, as the answer to this one says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How the training process ended."""

    exit_code: int | None
    """Of the training process or its torchrun; None if it was never started."""
    evidence: Mapping[str, Any] | None
    """``engine.training.failures.ExitEvidence`` as JSON; None if no rank explains the end. Of an evaluation: see
    :mod:`agent.evaluation`."""
    stop_reason: str | None
    """Why the agent stopped it, if it did: ``cancel``, ``pause``, ``preempt`` or ``stalled``."""
    stall: str | None = None
    """What was observed of a process that was stopped because it stalled."""
    error: Mapping[str, Any] | None = None
    """Why it could not be started: an ``FtError`` as JSON."""
    follows: bool = False
    """It ended because another node of the gang had: it was stopped for that, or its ranks lost the connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    node: int = 0
    """Number of the agent's node in the gang."""
    address: str = ""
    """``host:port`` at which this node could lead the gang; empty until everything that its ranks need is there."""
    phase: str = ""
    """Phase of the training process; ``fetch`` before its start."""
    evaluation: Mapping[str, Any] | None = None
    """Progress of an evaluation, as its process writes it."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Lines of ``metrics.jsonl`` after those already accepted: of steps, then of validations."""
    facts: Facts = Facts()
    notices: tuple[Notice, ...] = ()
    first_notice: int = 0
    """Number of the first of them, counted from 0: one that is sent again is recorded once."""
    number: int = 1
    """Number of this heartbeat: one that is overtaken changes nothing."""
    exit: Exit | None = None
    """Only in the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswer:
    stop: str | None = None
    """``cancel``, ``pause`` or ``preempt`` if the workload is to stop."""
    next_s: float = HEARTBEAT_S
    """Seconds to the next heartbeat."""
    leader: str = ""
    """Address of node 0, once every node of the gang can start."""
    from_step: int = 0
    """Step from which it continues, with `leader`."""
    peer_failed: bool = False
    """Another node of the gang has ended before its training did: this one must end too."""
    alone: bool = False
    """Every other node has ended: nothing more comes from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A checkpoint that could not be used."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Where the attempt begins."""

    step: int
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Newest metrics of the job that were accepted, from any attempt."""

    step: int
    validation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest:
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadGrants:
    urls: Mapping[str, str]
    """URL by key: ``file:`` of a local object store, else presigned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    key: str
    part_sha256: tuple[str, ...]
    """Digest of each part of :data:`PART_BYTES`, in order; one for a file of at most that size."""
    upload_id: str | None = None
    """Of a multipart upload that was begun: its URLs are granted again, for those that expire."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartGrant:
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Signed with the URL: the store refuses other bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteGrant:
    parts: tuple[PartGrant, ...]
    upload_id: str | None = None
    """Of a multipart upload, which :class:`Completion` ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    key: str
    upload_id: str
    etags: tuple[str, ...]
    part_sha256: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A checkpoint or finished model whose files are all stored."""

    step: int
    manifest_sha256: str
    final: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The call took effect."""

    ok: bool = True
