# Written by `python -m tools.client` from asynchronous/resources/admin.py: change that, and run it again.
"""``client.admin``: what operators do, with a key of theirs (``ft-op-...``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from control_plane.client.synchronous.connection import Connection
from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
from control_plane.client.synchronous.resources.billing import Width
from control_plane.client.types import (
    Adjust,
    ApiKey,
    AuditLine,
    CreateKey,
    CreateTenant,
    DecideRefund,
    DrainNode,
    Invoice,
    InvoiceSummary,
    LedgerCheck,
    LedgerEntry,
    NewApiKey,
    NewTenant,
    Node,
    OperatorQueue,
    OperatorRefundCase,
    Suspend,
    Tenant,
    TrialBalance,
    UpdateTenant,
    Usage,
)
from control_plane.client.wire import at, given


class Tenants(Resource):
    """Every tenant of the platform, and its keys."""

    def create(self, **body: Unpack[CreateTenant]) -> NewTenant:
        """Make a tenant and its first key, whose secret is in this answer and nowhere else."""
        return self._api.call(NewTenant, "POST", at("/v1/admin/tenants"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Tenant]:
        """Every tenant, by id."""
        return self._api.pages(Tenant, at("/v1/admin/tenants"), given(limit=limit, after=after))

    def retrieve(self, tenant: str) -> Tenant:
        """One tenant, with the limits that hold for it."""
        return self._api.call(Tenant, "GET", at("/v1/admin/tenants/{tenant}", tenant=tenant))

    def update(self, tenant: str, **body: Unpack[UpdateTenant]) -> Tenant:
        """Change name, tier or limits; the next admission meets them."""
        return self._api.call(Tenant, "POST", at("/v1/admin/tenants/{tenant}", tenant=tenant), json=body, repeatable=True)

    def suspend(self, tenant: str, **body: Unpack[Suspend]) -> Tenant:
        """Refuse every call of the tenant's keys, with a reason; jobs that run go on."""
        return self._api.call(Tenant, "POST", at("/v1/admin/tenants/{tenant}/suspend", tenant=tenant), json=body, repeatable=True)

    def resume(self, tenant: str) -> Tenant:
        """Let the tenant's keys in again."""
        return self._api.call(Tenant, "POST", at("/v1/admin/tenants/{tenant}/resume", tenant=tenant), repeatable=True)

    def api_keys(self, tenant: str, *, limit: int = 100, after: str | None = None) -> Pages[ApiKey]:
        """Keys of a tenant, newest first, revoked ones too."""
        return self._api.pages(ApiKey, at("/v1/admin/tenants/{tenant}/api_keys", tenant=tenant), given(limit=limit, after=after))

    def create_api_key(self, tenant: str, **body: Unpack[CreateKey]) -> NewApiKey:
        """Make a key of a tenant that has lost its own."""
        return self._api.call(NewApiKey, "POST", at("/v1/admin/tenants/{tenant}/api_keys", tenant=tenant), json=body)

    def revoke_api_key(self, tenant: str, key_id: str) -> ApiKey:
        """End a key of a tenant at once."""
        return self._api.call(ApiKey, "DELETE", at("/v1/admin/tenants/{tenant}/api_keys/{key_id}", tenant=tenant, key_id=key_id))

    def ledger(
        self, tenant: str, *, kind: str | None = None, job_id: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[LedgerEntry]:
        """Entries of a tenant, newest first, with who decided on them."""
        requested = given(kind=kind, job_id=job_id, limit=limit, after=after)
        return self._api.pages(LedgerEntry, at("/v1/admin/tenants/{tenant}/ledger", tenant=tenant), requested)

    def invoices(self, tenant: str, *, limit: int = 24, after: str | None = None) -> Pages[InvoiceSummary]:
        """Invoices of a tenant that were issued, newest month first."""
        return self._api.pages(InvoiceSummary, at("/v1/admin/tenants/{tenant}/invoices", tenant=tenant), given(limit=limit, after=after))

    def invoice(self, tenant: str, month: str) -> Invoice:
        """A tenant's invoice of a month (``yyyy-mm``), or its draft."""
        return self._api.call(Invoice, "GET", at("/v1/admin/tenants/{tenant}/invoices/{month}", tenant=tenant, month=month))


class PlatformUsage(Resource):
    """Usage of all tenants."""

    def retrieve(
        self,
        *,
        tenant: str | None = None,
        start_time: int | None = None,
        end_time: int | None = None,
        bucket_width: Width | None = None,
        group_by: Sequence[str] | None = None,
    ) -> Usage:
        """Usage of this month, or from `start_time` to `end_time`, of all tenants or of one.

        `group_by`: of ``tenant``, ``job_id``, ``model``, ``gpu_type``, ``pricing``, ``kind``.
        """
        requested = given(
            tenant=tenant, start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by)
        )
        return self._api.call(Usage, "GET", at("/v1/admin/usage"), params=requested)


class Refunds(Resource):
    """Attempts whose failure is nobody's for certain: a person decides."""

    def list(
        self, *, state: str | None = None, tenant: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[OperatorRefundCase]:
        """Cases, oldest first: ``pending`` (if not said otherwise), ``granted``, ``refused`` or ``all``."""
        return self._api.pages(OperatorRefundCase, at("/v1/admin/refunds"), given(state=state, tenant=tenant, limit=limit, after=after))

    def grant(self, case_id: str, **body: Unpack[DecideRefund]) -> OperatorRefundCase:
        """Give the attempt back, all of it; granting it again changes nothing."""
        path = at("/v1/admin/refunds/{case_id}/grant", case_id=case_id)
        return self._api.call(OperatorRefundCase, "POST", path, json=body, repeatable=True)

    def refuse(self, case_id: str, **body: Unpack[DecideRefund]) -> OperatorRefundCase:
        """Give nothing back; the tenant is told why."""
        path = at("/v1/admin/refunds/{case_id}/refuse", case_id=case_id)
        return self._api.call(OperatorRefundCase, "POST", path, json=body, repeatable=True)


class Books(Resource):
    """The whole platform's ledger."""

    def trial_balance(self) -> TrialBalance:
        """Every account of the platform with its balance; their sum is 0."""
        return self._api.call(TrialBalance, "GET", at("/v1/admin/ledger"))

    def check(self) -> LedgerCheck:
        """Verify every entry against its postings and against what it was made of: minutes, where the ledger is long."""
        return self._api.call(LedgerCheck, "GET", at("/v1/admin/ledger/check"), timeout=600.0)

    def adjust(self, **body: Unpack[Adjust]) -> LedgerEntry:
        """Correct a tenant's bill by an entry of its own, with the reason on the invoice; the same ``key`` is the same entry."""
        return self._api.call(LedgerEntry, "POST", at("/v1/admin/adjustments"), json=body, repeatable=bool(body.get("key")))


class PlatformAuditLog(Resource):
    """Every change on the platform."""

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
        """Changes in all tenants, or in one, and of the platform itself, newest first."""
        requested = given(tenant=tenant, object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        times = given(**{"created[gte]": created_from, "created[lt]": created_before})
        return self._api.pages(AuditLine, at("/v1/admin/audit_log"), requested | times)


class WholeQueue(Resource):
    """The queue of all tenants."""

    def retrieve(self, *, limit: int = 200) -> OperatorQueue:
        """Everything in it: of those that wait the first `limit`; nodes, reservations, recent use, what the rounds did."""
        return self._api.call(OperatorQueue, "GET", at("/v1/admin/queue"), params=given(limit=limit))


class Nodes(Resource):
    """The nodes of the pools, and which of them get nothing new."""

    def list(self) -> Pages[Node]:
        """Every node of every pool, with the GPUs that are held there."""
        return self._api.pages(Node, at("/v1/admin/nodes"), given())

    def retrieve(self, node: str) -> Node:
        """One node."""
        return self._api.call(Node, "GET", at("/v1/admin/nodes/{node}", node=node))

    def drain(self, node: str, **body: Unpack[DrainNode]) -> Node:
        """Place nothing new on it; what runs there goes on. Draining it again changes the reason."""
        return self._api.call(Node, "POST", at("/v1/admin/nodes/{node}/drain", node=node), json=body, repeatable=True)

    def undrain(self, node: str) -> Node:
        """Place jobs on it again."""
        return self._api.call(Node, "POST", at("/v1/admin/nodes/{node}/undrain", node=node), repeatable=True)


class Admin(Resource):
    """The nouns of operators."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.tenants = Tenants(connection)
        self.usage = PlatformUsage(connection)
        self.refunds = Refunds(connection)
        self.ledger = Books(connection)
        self.audit_log = PlatformAuditLog(connection)
        self.queue = WholeQueue(connection)
        self.nodes = Nodes(connection)
