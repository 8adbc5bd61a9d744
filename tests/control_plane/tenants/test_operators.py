"""Operators: apart from tenants, and what they change of them: limits, suspension, keys, and the log of it all."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import operators, suspension
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import TIERS, Tenant
from core.errors import InvalidRequest, Unauthenticated
from tests.support.platform.database_roles import as_operator

Call = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def operator(platform: Platform) -> operators.NewOperatorKey:
    return operators.create(as_operator(platform), "ops")


@pytest.fixture
def admin(api_url: str, operator: operators.NewOperatorKey) -> Call:
    def send(method: str, path: str, *, key: str = operator.secret, **options: Any) -> httpx.Response:
        return httpx.request(method, f"{api_url}/v1/{path}", headers={"authorization": f"Bearer {key}"}, **options)

    return send


def test_neither_key_opens_the_others_routes(admin: Call, api_key: str, operator: operators.NewOperatorKey) -> None:
    refused = admin("GET", "admin/tenants", key=api_key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
    assert operator.secret not in refused.text and "operator" in refused.json()["error"]["message"]
    refused = admin("GET", "models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_key_required")
    assert admin("GET", "admin/tenants", key="ft-op-wrong").status_code == 401


def test_an_operators_key_ends_when_it_is_revoked_or_old(platform: Platform) -> None:
    made = operators.create(as_operator(platform), "short", expires_in_s=60)
    assert operators.authenticate(platform, made.secret).name == "short"
    later = replace(platform, clock=lambda: platform.clock() + timedelta(seconds=61))
    with pytest.raises(Unauthenticated, match="expired"):
        operators.authenticate(later, made.secret)
    operators.revoke(as_operator(platform), made.id)
    assert operators.revoke(as_operator(platform), made.id).revoked_at is not None
    with pytest.raises(Unauthenticated, match="revoked"):
        operators.authenticate(platform, made.secret)
    with pytest.raises(InvalidRequest, match="a year"):
        operators.create(as_operator(platform), "for ever", expires_in_s=10**9)


def test_an_operators_secret_is_kept_as_a_hash(platform: Platform, operator: operators.NewOperatorKey) -> None:
    with platform.engine.connect() as conn:
        stored = conn.exec_driver_sql("SELECT string_agg(k::text, ' ') FROM operator_keys k").scalar()
    assert operator.secret not in stored and operator.id in stored
    assert all(not hasattr(row, "sha256") for row in operators.list_all(platform))


def test_a_tenant_is_made_with_its_owner_and_its_first_key(admin: Call) -> None:
    id_ = f"t-{uuid.uuid4().hex[:8]}"
    made = admin("POST", "admin/tenants", json={"id": id_, "tier": "free", "owner_email": "o@example.com"}).json()
    assert (made["id"], made["tier"], made["limits"]["hard_gpu_hours"]) == (id_, "free", 10.0)
    key = made["api_key"]["secret"]
    assert admin("GET", "me", key=key).json()["tenant_id"] == id_
    assert [m["role"] for m in admin("GET", "members", key=key).json()["data"]] == ["owner"]
    assert admin("POST", "admin/tenants", json={"id": id_}).json()["error"]["code"] == "tenant_exists"
    refused = admin("POST", "admin/tenants", json={"id": f"{id_}x", "owner_email": "nobody"})
    assert refused.json()["error"]["code"] == "invalid_email"
    assert admin("GET", f"admin/tenants/{id_}x").status_code == 404, "nothing of it was made"


def test_tenants_are_listed_page_by_page(admin: Call, platform: Platform) -> None:
    made = sorted(tenants.create(platform, f"zz-{uuid.uuid4().hex[:8]}")[0].id for _ in range(3))
    page = admin("GET", f"admin/tenants?limit=2&after={made[0]}").json()
    assert [t["id"] for t in page["data"]][:2] == made[1:]


def test_another_tier_brings_its_limits_and_keeps_those_that_are_the_tenants_own(platform: Platform, tenant: Tenant) -> None:
    premium = suspension.update(platform, tenant.id, {"tier": "premium", "hard_gpu_hours": 9000})
    assert (premium.max_jobs_in_flight, premium.hard_gpu_hours) == (TIERS["premium"].max_jobs_in_flight, 9000)
    own = suspension.update(platform, tenant.id, {"max_jobs_in_flight": 7})
    assert own.requests_per_minute == TIERS["premium"].requests_per_minute
    free = suspension.update(platform, tenant.id, {"tier": "free", "hard_gpu_hours": None})
    assert (free.max_jobs_in_flight, free.hard_gpu_hours) == (7, 10.0)
    assert suspension.update(platform, tenant.id, {"max_jobs_in_flight": None}).max_jobs_in_flight == 2


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"max_jobs_in_flight": -1}, "max_jobs_in_flight"), ({"max_jobs_in_flight": 1.5}, "max_jobs_in_flight"),
     ({"requests_per_minute": 0}, "requests_per_minute"), ({"soft_gpu_hours": 2000}, "soft_gpu_hours"),
     ({"hard_gpu_hours": float("nan")}, "hard_gpu_hours"), ({"tier": "gold"}, "tier"), ({"name": ""}, "name")],
)  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused(platform: Platform, tenant: Tenant, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        suspension.update(platform, tenant.id, changes)
    assert refused.value.param == param
    assert tenants.get(platform, tenant.id) == tenant


def test_a_suspended_tenant_is_told_why_and_let_in_again(admin: Call, tenant: Tenant, api_key: str) -> None:
    assert admin("POST", f"admin/tenants/{tenant.id}/suspend", json={"reason": "invoice 7 is unpaid"}).json()["suspended_at"]
    for method, path in (("GET", "models"), ("GET", "me"), ("POST", "fine_tuning/jobs"), ("DELETE", "files/file-1")):
        refused = admin(method, path, key=api_key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
        assert "invoice 7 is unpaid" in refused.json()["error"]["message"] and "Ask your operator" in refused.json()["error"]["message"]
    first = admin("GET", f"admin/tenants/{tenant.id}").json()
    again = admin("POST", f"admin/tenants/{tenant.id}/suspend", json={"reason": "fraud"}).json()
    assert (again["suspended_at"], again["suspended_reason"]) == (first["suspended_at"], "fraud")
    assert admin("POST", f"admin/tenants/{tenant.id}/resume").json()["suspended_at"] is None
    assert admin("GET", "models", key=api_key).status_code == 200


def test_an_operator_helps_a_tenant_that_lost_its_keys(admin: Call, tenant: Tenant) -> None:
    made = admin("POST", f"admin/tenants/{tenant.id}/api_keys", json={"name": "rescue", "scopes": ["admin"]}).json()
    assert admin("GET", "me", key=made["secret"]).json()["tenant_id"] == tenant.id
    listed = admin("GET", f"admin/tenants/{tenant.id}/api_keys")
    assert made["id"] in listed.text and made["secret"] not in listed.text
    assert admin("DELETE", f"admin/tenants/{tenant.id}/api_keys/{made['id']}").json()["revoked_at"]
    assert admin("GET", "me", key=made["secret"]).status_code == 401
    for path in ("admin/tenants/nobody", "admin/tenants/nobody/api_keys"):
        assert admin("GET", path).json()["error"]["code"] == "tenant_not_found"
    assert admin("POST", "admin/tenants/nobody/api_keys", json={"name": "k"}).json()["error"]["code"] == "tenant_not_found"


def test_what_an_operator_did_is_in_the_log_of_the_tenant_and_of_all(
    admin: Call, tenant: Tenant, api_key: str, operator: operators.NewOperatorKey
) -> None:
    admin("POST", f"admin/tenants/{tenant.id}", json={"max_jobs_in_flight": 9})
    (line,) = admin("GET", f"audit_log?actor={operator.id}", key=api_key).json()["data"]
    assert (line["action"], line["changes"]) == ("tenant.updated", {"max_jobs_in_flight": [5, 9]})
    assert line["actor"] == {"type": "operator", "id": operator.id, "name": None, "member_id": None, "email": None}
    (seen,) = admin("GET", f"admin/audit_log?tenant={tenant.id}&action=tenant.updated").json()["data"]
    assert (seen["id"], seen["actor"]["name"]) == (line["id"], "ops"), "who it is, operators alone see"
    made = admin("GET", f"admin/audit_log?object_id={operator.id}").json()["data"]
    assert [(m["action"], m["tenant_id"]) for m in made] == [("operator_key.created", None)]
    assert admin("GET", f"audit_log?object_id={operator.id}", key=api_key).json()["data"] == []
