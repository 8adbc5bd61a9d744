"""``client.admin``: operators' calls, with an operator's key (``ft-op-...``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_client.connection import Connection, Resource
from ft_client.pages import Page, Pages
from ft_client.types import (
    Adapter,
    ApiKey,
    AuditLine,
    DeadLetter,
    Invoice,
    InvoiceSummary,
    LedgerCheck,
    LedgerEntry,
    NewApiKey,
    NewTenant,
    Node,
    OperatorQueue,
    OperatorRefundCase,
    RecipeVersion,
    Tenant,
    TrialBalance,
    Usage,
)
from ft_client.wire import at, given


class Tenants(Resource):
    """All tenants of the platform, and their keys."""

    def create(self, *, id: str, **options: Any) -> NewTenant:
        """Creates a tenant and its first key, whose secret is only in this response.

        Options: `tier`, `name`, `owner_email`.
        """
        return self._api.call("POST", at("/v1/admin/tenants"), json={"id": id, **options})

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Tenant]:
        """Lists every tenant, by id."""
        return self._api.pages(at("/v1/admin/tenants"), given(limit=limit, after=after))

    def retrieve(self, tenant: str) -> Tenant:
        """Returns one tenant, with its limits."""
        return self._api.call("GET", at("/v1/admin/tenants/{tenant}", tenant))

    def update(self, tenant: str, **options: Any) -> Tenant:
        """Changes name, tier or limits; applies from the next admission on.

        Options: `name`, `tier`, `max_jobs_in_flight`, `soft_gpu_hours`, `hard_gpu_hours`, `requests_per_minute`.
        """
        return self._api.call("POST", at("/v1/admin/tenants/{tenant}", tenant), json=options, repeatable=True)

    def suspend(self, tenant: str, *, reason: str) -> Tenant:
        """Refuses every call of the tenant's keys, with a reason; running jobs continue."""
        return self._api.call("POST", at("/v1/admin/tenants/{tenant}/suspend", tenant), json={"reason": reason}, repeatable=True)

    def resume(self, tenant: str) -> Tenant:
        """Accepts the tenant's keys again."""
        return self._api.call("POST", at("/v1/admin/tenants/{tenant}/resume", tenant), repeatable=True)

    def api_keys(self, tenant: str, *, limit: int = 100, after: str | None = None) -> Pages[ApiKey]:
        """Lists keys of a tenant, newest first, including revoked ones."""
        return self._api.pages(at("/v1/admin/tenants/{tenant}/api_keys", tenant), given(limit=limit, after=after))

    def create_api_key(self, tenant: str, *, name: str, **options: Any) -> NewApiKey:
        """Creates a key for a tenant that has lost its own.

        Options: `scopes`, `expires_in`, `member_id`, `requests_per_minute`.
        """
        return self._api.call("POST", at("/v1/admin/tenants/{tenant}/api_keys", tenant), json={"name": name, **options})

    def revoke_api_key(self, tenant: str, key_id: str) -> ApiKey:
        """Revokes a key of a tenant at once."""
        return self._api.call("DELETE", at("/v1/admin/tenants/{tenant}/api_keys/{key_id}", tenant, key_id))

    def ledger(
        self, tenant: str, *, kind: str | None = None, job_id: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[LedgerEntry]:
        """Lists ledger entries of a tenant, newest first, with who decided on them."""
        requested = given(kind=kind, job_id=job_id, limit=limit, after=after)
        return self._api.pages(at("/v1/admin/tenants/{tenant}/ledger", tenant), requested)

    def invoices(self, tenant: str, *, limit: int = 24, after: str | None = None) -> Pages[InvoiceSummary]:
        """Lists issued invoices of a tenant, newest month first."""
        return self._api.pages(at("/v1/admin/tenants/{tenant}/invoices", tenant), given(limit=limit, after=after))

    def invoice(self, tenant: str, month: str) -> Invoice:
        """Returns a tenant's invoice of a month (``yyyy-mm``), or its draft."""
        return self._api.call("GET", at("/v1/admin/tenants/{tenant}/invoices/{month}", tenant, month))


class PlatformUsage(Resource):
    """Usage of all tenants."""

    def retrieve(
        self,
        *,
        tenant: str | None = None,
        start_time: int | None = None,
        end_time: int | None = None,
        bucket_width: str | None = None,
        group_by: Sequence[str] | None = None,
    ) -> Usage:
        """Returns usage of this month, or from `start_time` to `end_time`, of all tenants or of one.

        `group_by`: any of ``tenant``, ``job_id``, ``model``, ``gpu_type``, ``pricing``, ``kind``,
        ``api_key_id``, ``metadata[KEY]``.
        """
        requested = given(
            tenant=tenant, start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by)
        )
        return self._api.call("GET", at("/v1/admin/usage"), params=requested)


class Refunds(Resource):
    """Attempts whose failure could not be attributed: an operator decides."""

    def list(
        self, *, state: str | None = None, tenant: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[OperatorRefundCase]:
        """Lists cases, oldest first: ``pending`` (default), ``granted``, ``refused`` or ``all``."""
        return self._api.pages(at("/v1/admin/refunds"), given(state=state, tenant=tenant, limit=limit, after=after))

    def grant(self, case_id: str, *, note: str) -> OperatorRefundCase:
        """Refunds the whole attempt; granting it again changes nothing."""
        return self._api.call("POST", at("/v1/admin/refunds/{case_id}/grant", case_id), json={"note": note}, repeatable=True)

    def refuse(self, case_id: str, *, note: str) -> OperatorRefundCase:
        """Refuses a refund; the tenant receives the reason."""
        return self._api.call("POST", at("/v1/admin/refunds/{case_id}/refuse", case_id), json={"note": note}, repeatable=True)


class Books(Resource):
    """The ledger of the whole platform."""

    def trial_balance(self) -> TrialBalance:
        """Lists every account of the platform with its balance; their sum is 0."""
        return self._api.call("GET", at("/v1/admin/ledger"))

    def check(self) -> LedgerCheck:
        """Verifies every entry against its postings and against its source data; takes minutes for a long ledger."""
        return self._api.call("GET", at("/v1/admin/ledger/check"), timeout=600.0)

    def adjust(self, *, tenant: str, amount_micros: int, reason: str, **options: Any) -> LedgerEntry:
        """Corrects a tenant's bill with a separate entry, with the reason on the invoice; the same ``key`` is the same entry.

        Options: `key`.
        """
        return self._api.call(
            "POST",
            at("/v1/admin/adjustments"),
            json={"tenant": tenant, "amount_micros": amount_micros, "reason": reason, **options},
            repeatable=bool(options.get("key")),
        )


class PlatformAuditLog(Resource):
    """The record of every change on the platform."""

    def list(
        self,
        *,
        tenant: str | None = None,
        object_type: str | None = None,
        object_id: str | None = None,
        action: str | None = None,
        actor: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[AuditLine]:
        """Lists changes in all tenants, or in one, and of the platform itself, newest first."""
        requested = given(tenant=tenant, object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        times = given(**{"created[gte]": created_from, "created[lt]": created_before})
        return self._api.pages(at("/v1/admin/audit_log"), requested | times)


class WholeQueue(Resource):
    """The queue of all tenants."""

    def retrieve(self, *, limit: int = 200) -> OperatorQueue:
        """Returns the whole queue: the first `limit` waiting jobs; nodes, reservations, recent use, and counters of scheduling cycles."""
        return self._api.call("GET", at("/v1/admin/queue"), params=given(limit=limit))


class TenantsAdapters(Resource):
    """Models of tenants."""

    def release(self, tenant: str, adapter_id: str, *, reason: str) -> Adapter:
        """Serves one that did not pass its gate, also one that failed the safety rule."""
        path = at("/v1/admin/tenants/{tenant}/adapters/{adapter_id}/release", tenant, adapter_id)
        return self._api.call("POST", path, json={"reason": reason}, repeatable=True)


class DeadLetters(Resource):
    """Jobs that were given up after repeated failures of the platform."""

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[DeadLetter]:
        """Lists them, newest first."""
        return self._api.pages(at("/v1/admin/dead_letters"), given(limit=limit, after=after))

    def release(self, job_id: str) -> DeadLetter:
        """Queues one again; its failures so far no longer count."""
        return self._api.call("POST", at("/v1/admin/dead_letters/{job_id}/release", job_id))

    def close(self, job_id: str) -> DeadLetter:
        """Leaves one failed."""
        return self._api.call("POST", at("/v1/admin/dead_letters/{job_id}/close", job_id))


class Nodes(Resource):
    """The nodes of the pools, and which of them are drained."""

    def list(self) -> Pages[Node]:
        """Lists every node of every pool, with its GPUs in use."""
        return self._api.pages(at("/v1/admin/nodes"), given())

    def retrieve(self, node: str) -> Node:
        """Returns one node."""
        return self._api.call("GET", at("/v1/admin/nodes/{node}", node))

    def drain(self, node: str, *, reason: str) -> Node:
        """Drains a node: no new jobs are placed on it, running ones continue. Draining it again changes the reason."""
        return self._api.call("POST", at("/v1/admin/nodes/{node}/drain", node), json={"reason": reason}, repeatable=True)

    def undrain(self, node: str) -> Node:
        """Places jobs on it again."""
        return self._api.call("POST", at("/v1/admin/nodes/{node}/undrain", node), repeatable=True)


class OperatorRecipes(Resource):
    """Recipes of the platform's operators."""

    def list(self) -> Pages[RecipeVersion]:
        """Lists every version, retired ones too."""
        return self._api.pages(at("/v1/admin/recipes"), given())

    def add(self, recipes: Sequence[Mapping[str, Any]]) -> Page[RecipeVersion]:
        """Adds versions, all or none; those that exist with the same content stay as they are."""
        return self._api.call("POST", at("/v1/admin/recipes"), json={"recipes": [*recipes]}, repeatable=True)

    def retire(self, name: str) -> Page[RecipeVersion]:
        """Uses no version of a recipe for new jobs."""
        return self._api.call("POST", at("/v1/admin/recipes/{name}/retire", name), repeatable=True)


class Admin(Resource):
    """The operators' resources."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.tenants = Tenants(connection)
        self.adapters = TenantsAdapters(connection)
        self.usage = PlatformUsage(connection)
        self.refunds = Refunds(connection)
        self.ledger = Books(connection)
        self.audit_log = PlatformAuditLog(connection)
        self.queue = WholeQueue(connection)
        self.recipes = OperatorRecipes(connection)
        self.dead_letters = DeadLetters(connection)
        self.nodes = Nodes(connection)
