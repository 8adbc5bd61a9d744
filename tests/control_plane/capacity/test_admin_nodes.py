"""``/v1/admin/nodes``: for operators alone."""

from __future__ import annotations

import httpx
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import operators
from tests.support.platform.database_roles import as_operator


@pytest.fixture
def admin(api_url: str, platform: Platform) -> httpx.Client:
    key = operators.create(as_operator(platform), "ops").secret
    return httpx.Client(base_url=f"{api_url}/v1/admin", headers={"authorization": f"Bearer {key}"})


def test_an_operator_lists_drains_and_takes_back_a_node(admin: httpx.Client, api_url: str, api_key: str) -> None:
    with admin:
        (node,) = admin.get("nodes").json()["data"]
        assert (node["id"], node["object"], node["pool"], node["state"], node["fabric"]) == ("local", "node", "local", "ready", None)
        done = admin.post("nodes/local/drain", json={"reason": "a new disk"}).json()
        assert (done["state"], done["reason"], done["drained_by"][:4]) == ("drained", "a new disk", "opk_")
        assert admin.get("nodes/local").json() == done and done["drained_at"] > 0
        back = admin.post("nodes/local/undrain").json()
        assert (back["state"], back["drained_at"], back["reason"]) == ("ready", None, None)
        assert admin.post("nodes/local/drain", json={"reason": ""}).status_code == 400
        unknown = admin.post("nodes/other/drain", json={"reason": "x"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "node_not_found")
    refused = httpx.get(f"{api_url}/v1/admin/nodes", headers={"authorization": f"Bearer {api_key}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
