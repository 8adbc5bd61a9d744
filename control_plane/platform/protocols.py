"""The seams: each outside thing is a Protocol here, with a real and a local implementation in ``resources``."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from agent.messages import Completion, WriteGrant
from core.workload import Workload
from engine.adapters import AdapterRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Immutable blobs under string keys (see ``core.layout``). ``NotFound`` for a key that is absent."""

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store `data` whole: a reader sees the old object or the new one, never a part."""

    def put_file(self, key: str, path: Path) -> None: ...
    def put_stream(self, key: str, stream: BinaryIO) -> int:
        """Store what `stream` yields in bounded memory; returns the bytes written."""

    def get_bytes(self, key: str) -> bytes: ...
    def open(self, key: str) -> BinaryIO: ...
    def get_file(self, key: str, path: Path) -> None:
        """Download to `path` (parents made, written beside and renamed)."""

    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix + "/"``, in key order."""

    def delete(self, key: str) -> None:
        """Remove `key`; absent is fine."""

    def cool(self, prefix: str) -> int | None:
        """Move the objects under `prefix` to cheaper storage, from which they are read as before; how many there are.

        None where the store has no such storage. Calling it again goes on.
        """

    def renew_keys(self, tenant: str) -> None:
        """Encrypt the tenant's objects with a new key from now on, if the store keeps a key of the tenant; older keys still open others."""

    def destroy_old_keys(self, tenant: str) -> int:
        """Destroy the tenant's keys but the newest, if the store keeps them; returns how many. What is encrypted with them is lost."""

    def uri(self, key: str) -> str:
        """``file:///...`` or ``s3://bucket/...``: for people and for lineage."""

    def read_url(self, key: str) -> str:
        """A URL that reads the object without credentials, for an hour: ``file:`` or presigned. ``NotFound`` where there is none."""

    def begin_upload(self, key: str, part_sha256: Sequence[str], upload_id: str | None = None) -> WriteGrant:
        """URLs that write the parts of one object without credentials, for an hour: the store refuses bytes of other digests. With the
        `upload_id` of one that was begun, its URLs for another hour."""

    def complete_upload(self, completion: Completion) -> None:
        """Make the parts of an upload the object; repeating it is fine."""


class WorkloadPhase(enum.StrEnum):
    ABSENT = "absent"
    PENDING = "pending"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    """It was started and is gone, and nobody saw how it ended (killed with its watcher, or the machine rebooted)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadStatus:
    name: str
    phase: WorkloadPhase
    exit_code: int | None = None
    """Of the leader; negative for a signal. None unless EXITED."""
    started_at: float | None = None
    """Unix seconds at which its agents had started: GPU time is billed from here."""
    ended_at: float | None = None
    broken: bool = False
    """It is running, but one of its agents was killed or lost."""
    reason: str = ""
    """Why it waits or how it ended, in the cluster's words: ``Unschedulable: 0/8 nodes are available``, ``OOMKilled``. Empty on one
    machine."""
    evicted: bool = False
    """The cluster took its nodes back."""
    nodes: tuple[str, ...] = ()
    """Machines that run it, in the order of its nodes, as far as they are known; on one machine empty."""


class Launcher(Protocol):
    """Starts workloads that outlive the caller. A name is used once: one that was started and has disappeared is LOST."""

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        """Start `workload` unless it was started before, by any process: an agent on each of its nodes. They get `token`, which is part
        of no description."""

    def get(self, name: str) -> WorkloadStatus: ...
    def list(self) -> Sequence[WorkloadStatus]:
        """Every workload that was started and not forgotten."""

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        """SIGTERM, then SIGKILL after `grace_s`; returns when the processes are gone. Absent is fine."""

    def forget(self, name: str) -> None:
        """Remove what is left of a workload that has ended; its name stays used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One inference server, as it described itself just now."""

    url: str
    ready: bool
    base: str | None = None
    """Name of the base model that it serves; of a server that does not answer, the last that it was heard to serve."""
    base_digest: str | None = None
    """Digest of the bytes of that base; None where the server does not tell."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Directory by name."""
    error: str | None = None
    """Why it is not ready."""
    silent: bool = False
    """It answered a moment ago and does not now: it may be busy, and what was seen of it holds for now."""


class Fleet(Protocol):
    """Multi-adapter inference servers, each by its URL, through vLLM's load and unload endpoints.

    Every call but :meth:`replicas` is about one server and raises ``Unavailable`` where asking again can help, and
    ``Conflict`` where it cannot. All of them may be repeated.
    """

    def replicas(self, also: Sequence[str] = ()) -> Sequence[Replica]:
        """Every configured server and those at the URLs `also`, asked at once. One that does not answer is part of the answer, and keeps
        nobody waiting for long."""

    def load(self, url: str, name: str, directory: Path) -> None:
        """Load an adapter; a name that is loaded already from the same directory is fine."""

    def unload(self, url: str, name: str) -> None:
        """Unload an adapter; a name that is not loaded is fine."""

    def probe(self, url: str, name: str) -> float:
        """One greedy token from `name`; returns the seconds that it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelServer:
    """The server of a whole model, as seen by what runs it. Whether it answers, only a request shows."""

    url: str = ""
    """Empty while it does not run: another program may listen there."""
    problem: str | None = None
    """Why it does not run; None if it runs or starts, as far as can be seen. Shown to its tenant."""
    refused: bool = False
    """The problem stays until something else changes."""


class ModelServers(Protocol):
    """Inference servers that the platform itself starts: one for each whole model in production, and pools of configured base models."""

    def keep(self, models: Sequence[AdapterRecord]) -> Mapping[str, ModelServer]:
        """Start what is missing, mend what has changed, and stop every other server; returns by id of their models the servers that are
        wanted, and those that have not ended yet.

        Waits for no server to start or stop. An error means that nothing is known of any of them.
        """

    def pool_urls(self) -> Sequence[str]:
        """URLs of the servers of base models; known without asking what runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """One attempt as an experiment tracker shows it."""

    tenant: str
    """Each tenant has an experiment of its own."""
    job_id: str
    attempt: int
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.job_id}-a{self.attempt}"


Tables = Mapping[str, Sequence[Mapping[str, Any]]]
NO_TABLES: Tables = {}


class RunLog(Protocol):
    """A run that is being written; calls return at once, whatever the tracker behind it does."""

    def log(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Measurements, each with ``step`` and ``time``; more than the tracker can take are dropped and counted."""

    def attach(self, files: Mapping[str, bytes], tables: Tables = NO_TABLES) -> None:
        """Files by path, and tables as rows with the same columns, to be looked at with the run; a later one of a path replaces it."""

    def problem(self) -> str | None:
        """Why something of this run did not arrive; None as long as all does."""

    def end(self, *, outcome: str) -> None:
        """Nothing follows. What is still on its way is written behind the caller's back; see :meth:`Tracker.flush`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """One adapter as a model registry shows it."""

    model: str
    """Logical name: tenant's lineage whose newest version is served."""
    adapter_id: str
    source: str
    """URI of its files."""
    description: str
    tags: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredModels:
    """What a model registry is to show: versions, oldest first, and for each model the adapter that an alias names."""

    versions: Sequence[RegisteredVersion]
    aliases: Mapping[str, Mapping[str, str]]
    """By model: adapter id by alias (``production``, ``staging``, ``previous``)."""


class ModelRegistry(Protocol):
    """Where models are looked at by people and found by other tools: a copy. What the platform itself needs is in its database."""

    def mirror(self, models: RegisteredModels) -> int:
        """Bring the registry to `models` and return the changes that took; what others registered beside it stays as it is.

        ``Unavailable`` when it does not answer; calling it again goes on.
        """


class Tracker(Protocol):
    """Where runs are looked at and compared: a copy for people. What the platform itself needs is in its database."""

    def begin(self, run: TrackedRun) -> RunLog:
        """Write to the run of this job and attempt, made on first use; whoever begins it again goes on in the same run."""

    def attach(self, run: TrackedRun, files: Mapping[str, bytes], tables: Tables = NO_TABLES) -> None:
        """Files and tables for a run that has ended and stays ended; a run that was never made gets none. :meth:`flush` waits for them."""

    def flush(self, *, timeout_s: float) -> None:
        """Wait for what ended runs have on its way; what takes longer is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbRun:
    """A job as a run of Weights & Biases."""

    id: str
    """The job's id."""
    project: str
    entity: str | None
    """User or team that owns the project; None: the default of the key."""
    name: str
    tags: Sequence[str]
    config: Mapping[str, Any]


class Wandb(Protocol):
    """Weights & Biases, with a tenant's key. Every call raises ``Unavailable`` with the reason if it fails, and may be repeated."""

    def open(self, run: WandbRun, *, key: str) -> str:
        """Create the run unless it exists, and return its entity."""

    def append(
        self, run: WandbRun, lines: Sequence[Mapping[str, Any]], *, entity: str, offset: int, summary: Mapping[str, Any],
        exit_code: int | None, key: str,
    ) -> None:  # fmt: skip
        """Write `lines` of the history from line `offset` on, replace the summary, and end the run if there is an `exit_code`."""

    def address(self, run: WandbRun, *, entity: str) -> str:
        """Return the URL at which people look at the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookAnswer:
    """What became of one webhook that was sent, or that was not."""

    status: int | None = None
    """Of HTTP; None where no answer came."""
    text: str = ""
    """The beginning of the answer's body, printable."""
    error: str | None = None
    """Why there is no answer."""
    retry_after_s: float | None = None
    """When the receiver wants to be asked again."""


class WebhookSender(Protocol):
    """Sends to URLs that tenants chose, and never to where they could not send themselves."""

    def check(self, url: str) -> None:
        """``InvalidRequest`` (``invalid_webhook_url``) for a URL that nothing would be sent to now."""

    def send(self, url: str, *, headers: Mapping[str, str], body: bytes) -> WebhookAnswer:
        """POST `body` once. The URL is checked anew, no redirect is followed, and it ends in bounded time; it raises for nothing
        that a receiver can do."""


class Mailer(Protocol):
    """Sends e-mail in the platform's name."""

    def send(self, *, to: str, subject: str, text: str, message_id: str) -> None:
        """Hand one plain message to the mail server; `message_id` is the same when it is sent again.

        ``Unavailable`` where asking again can help, ``Conflict`` where it cannot.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Authorization:
    """The beginning of a sign-in: where the browser is sent, and what belongs to the answer."""

    url: str
    state: str
    nonce: str
    verifier: str
    """Proves that the code was requested from here (PKCE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A person as the identity provider knows them."""

    email: str
    """Verified by the provider."""
    groups: tuple[str, ...] = ()


class IdentityProvider(Protocol):
    """Says who a person is (OpenID Connect). ``Unavailable`` if it does not answer, another error if its answer cannot be trusted."""

    host: str

    def begin(self, redirect_uri: str, *, another_account: bool = False) -> Authorization:
        """Return where the browser signs in, to come back to `redirect_uri`; `another_account`: even if it is signed in there."""

    def redeem(self, code: str, *, nonce: str, verifier: str, redirect_uri: str) -> Identity:
        """Return the person for whom the provider made `code`, which works once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search for a tenant looked at in one store."""

    store: str
    """``dagster``, ``mlflow``: with its address, without credentials."""
    searched: Sequence[str]
    found: Sequence[str]
    """Where something of the tenant is left; empty once all of it is gone."""
    not_searched: Sequence[str] = ()
    """Parts of the store that this search could not read."""


class TenantRecords(Protocol):
    """What a system beside the platform's own database and object store records about tenants.

    ``Unavailable`` when it does not answer; ``Conflict`` when something has to happen there first. Both calls may be repeated.
    `ids` are the tenant's jobs, files, adapters and evaluations; no two tenants share one.
    """

    name: ClassVar[str]

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:
        """Delete every record that names the tenant or one of `ids`; how many there were, by kind. After `budget_s` seconds it stops
        between two records, and :meth:`search` finds the rest."""

    def search(self, tenant: str, ids: Collection[str]) -> Search:
        """Look for the tenant and for each of `ids` in everything that the system stores."""
