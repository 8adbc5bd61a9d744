# Written by `python -m tools.client` from asynchronous/resources/admin.py: change that, and run it again.
"""``client.admin``: operations of the whole platform, which need an operator key (``ft-op-...``)."""

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
    """All tenants and their API keys."""

    def create(self, **body: Unpack[CreateTenant]) -> NewTenant:
        """Creates a tenant and its first key; only this response contains the key's secret."""
        return self._api.call(NewTenant, "POST", at("/v1/admin/tenants"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Tenant]:
        """Lists all tenants by id."""
        return self._api.pages(Tenant, at("/v1/admin/tenants"), given(limit=limit, after=after))

    def retrieve(self, tenant: str) -> Tenant:
        """Returns a tenant with its effective limits."""
        return self._api.call(Tenant, "GET", at("/v1/admin/tenants/{tenant}", tenant=tenant))

    def update(self, tenant: str, **body: Unpack[UpdateTenant]) -> Tenant:
        """Changes a tenant's name, tier or limits, effective from the next admission."""
        return self._api.call(Tenant, "POST", at("/v1/admin/tenants/{tenant}", tenant=tenant), json=body, repeatable=True)

    def suspend(self, tenant: str, **body: Unpack[Suspend]) -> Tenant:
        """Suspends a tenant: its keys are refused with the given reason; running jobs continue."""
        return self._api.call(Tenant, "POST", at("/v1/admin/tenants/{tenant}/suspend", tenant=tenant), json=body, repeatable=True)

    def resume(self, tenant: str) -> Tenant:
        """Accepts the tenant's keys again."""
        return self._api.call(Tenant, "POST", at("/v1/admin/tenants/{tenant}/resume", tenant=tenant), repeatable=True)

    def api_keys(self, tenant: str, *, limit: int = 100, after: str | None = None) -> Pages[ApiKey]:
        """Lists a tenant's keys, newest first, including revoked ones."""
        return self._api.pages(ApiKey, at("/v1/admin/tenants/{tenant}/api_keys", tenant=tenant), given(limit=limit, after=after))

    def create_api_key(self, tenant: str, **body: Unpack[CreateKey]) -> NewApiKey:
        """Creates a key for a tenant, for example one that lost its own."""
        return self._api.call(NewApiKey, "POST", at("/v1/admin/tenants/{tenant}/api_keys", tenant=tenant), json=body)

    def revoke_api_key(self, tenant: str, key_id: str) -> ApiKey:
        """Revokes a tenant's key immediately."""
        return self._api.call(ApiKey, "DELETE", at("/v1/admin/tenants/{tenant}/api_keys/{key_id}", tenant=tenant, key_id=key_id))

    def ledger(
        self, tenant: str, *, kind: str | None = None, job_id: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[LedgerEntry]:
        """Lists a tenant's ledger entries, newest first, with who decided on them."""
        asked = given(kind=kind, job_id=job_id, limit=limit, after=after)
        return self._api.pages(LedgerEntry, at("/v1/admin/tenants/{tenant}/ledger", tenant=tenant), asked)

    def invoices(self, tenant: str, *, limit: int = 24, after: str | None = None) -> Pages[InvoiceSummary]:
        """Lists a tenant's issued invoices, newest month first."""
        return self._api.pages(InvoiceSummary, at("/v1/admin/tenants/{tenant}/invoices", tenant=tenant), given(limit=limit, after=after))

    def invoice(self, tenant: str, month: str) -> Invoice:
        """Returns a tenant's invoice for a month (``yyyy-mm``), or its draft."""
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
        """Returns usage of this month, or from `start_time` to `end_time`, of all tenants or one.

        `group_by`: ``tenant``, ``job_id``, ``model``, ``gpu_type``, ``pricing``, ``kind``.
        """
        asked = given(
            tenant=tenant, start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by)
        )
        return self._api.call(Usage, "GET", at("/v1/admin/usage"), params=asked)


class Refunds(Resource):
    """Failed attempts with an ambiguous cause, whose refund an operator decides."""

    def list(
        self, *, state: str | None = None, tenant: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[OperatorRefundCase]:
        """Lists cases, oldest first: ``pending`` (default), ``granted``, ``refused`` or ``all``."""
        return self._api.pages(OperatorRefundCase, at("/v1/admin/refunds"), given(state=state, tenant=tenant, limit=limit, after=after))

    def grant(self, case_id: str, **body: Unpack[DecideRefund]) -> OperatorRefundCase:
        """Refunds the whole attempt; granting it again changes nothing."""
        path = at("/v1/admin/refunds/{case_id}/grant", case_id=case_id)
        return self._api.call(OperatorRefundCase, "POST", path, json=body, repeatable=True)

    def refuse(self, case_id: str, **body: Unpack[DecideRefund]) -> OperatorRefundCase:
        """Refuses the refund; the tenant sees the reason."""
        path = at("/v1/admin/refunds/{case_id}/refuse", case_id=case_id)
        return self._api.call(OperatorRefundCase, "POST", path, json=body, repeatable=True)


class Books(Resource):
    """The ledger of the whole platform."""

    def trial_balance(self) -> TrialBalance:
        """Returns every account of the platform with its balance; the balances sum to 0."""
        return self._api.call(TrialBalance, "GET", at("/v1/admin/ledger"))

    def check(self) -> LedgerCheck:
        """Verifies every entry against its postings and its source; takes minutes for a long ledger."""
        return self._api.call(LedgerCheck, "GET", at("/v1/admin/ledger/check"), timeout=600.0)

    def adjust(self, **body: Unpack[Adjust]) -> LedgerEntry:
        """Corrects a tenant's bill with a separate entry, whose reason is shown on the invoice; the same ``key`` makes one entry."""
        return self._api.call(LedgerEntry, "POST", at("/v1/admin/adjustments"), json=body, repeatable=bool(body.get("key")))


class PlatformAuditLog(Resource):
    """All changes on the platform."""

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
        """Lists changes in all tenants or one, and of the platform itself, newest first."""
        asked = given(tenant=tenant, object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        times = given(**{"created[gte]": created_from, "created[lt]": created_before})
        return self._api.pages(AuditLine, at("/v1/admin/audit_log"), asked | times)


class WholeQueue(Resource):
    """The queue of all tenants."""

    def retrieve(self, *, limit: int = 200) -> OperatorQueue:
        """Returns the queue: running jobs, the first `limit` queued jobs, nodes, reservations, recent usage and scheduling cycles."""
        return self._api.call(OperatorQueue, "GET", at("/v1/admin/queue"), params=given(limit=limit))


class Nodes(Resource):
    """Nodes of the pools."""

    def list(self) -> Pages[Node]:
        """Lists all nodes with the GPUs in use on them."""
        return self._api.pages(Node, at("/v1/admin/nodes"), given())

    def retrieve(self, node: str) -> Node:
        """Returns a node."""
        return self._api.call(Node, "GET", at("/v1/admin/nodes/{node}", node=node))

    def drain(self, node: str, **body: Unpack[DrainNode]) -> Node:
        """Drains a node: no new jobs are placed there, running ones continue. Draining it again changes the reason."""
        return self._api.call(Node, "POST", at("/v1/admin/nodes/{node}/drain", node=node), json=body, repeatable=True)

    def undrain(self, node: str) -> Node:
        """Allows jobs on the node again."""
        return self._api.call(Node, "POST", at("/v1/admin/nodes/{node}/undrain", node=node), repeatable=True)


class Admin(Resource):
    """Resources for operators."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.tenants = Tenants(connection)
        self.usage = PlatformUsage(connection)
        self.refunds = Refunds(connection)
        self.ledger = Books(connection)
        self.audit_log = PlatformAuditLog(connection)
        self.queue = WholeQueue(connection)
        self.nodes = Nodes(connection)
