"""A dataset of a Hub becomes a file of the tenant like any upload."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from control_plane.service import files, hub
from control_plane.service.platform import Platform
from control_plane.tenants import Tenant
from ft_assets.errors import InvalidRequest, NotFound
from tests.ft_assets.datasets.test_hub import SHA, Hub


@pytest.fixture
def server() -> Iterator[Hub]:
    made = Hub()
    rows = [{"q": f"What is {i} plus {i}?", "a": f"It is {2 * i}. Ask jane.doe@example.com."} for i in range(120)]
    made.repos["acme/sums"] = {"train.jsonl": "".join(json.dumps(r) + "\n" for r in rows).encode()}
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_an_import_is_a_validated_file_that_says_where_it_is_from(platform: Platform, tenant: Tenant, server: Hub) -> None:
    near = replace(platform, settings=replace(platform.settings, hub_endpoint=server.endpoint))
    file = hub.import_dataset(
        near, tenant.id, hub_id=f"hf://acme/sums@{SHA}", column_map={"q": "prompt", "a": "completion"}, policies={"pii": "redact"}
    )
    assert (file["status"], file["source"], file["filename"]) == ("processed", f"hf://datasets/acme/sums@{SHA}:train", "train.jsonl")
    assert file["report"]["examples"] > 100
    assert file["report"]["stats"]["personal_data"]["rows"] == 120


def test_an_import_that_cannot_be_is_refused_with_the_reason(platform: Platform, tenant: Tenant, server: Hub) -> None:
    near = replace(platform, settings=replace(platform.settings, hub_endpoint=server.endpoint))
    with pytest.raises(InvalidRequest, match=SHA) as branch:
        hub.import_dataset(near, tenant.id, hub_id="hf://acme/sums@main")
    assert branch.value.code == "hub_revision_not_pinned"
    with pytest.raises(NotFound) as absent:
        hub.import_dataset(near, tenant.id, hub_id=f"hf://acme/nothing@{SHA}")
    assert absent.value.code == "hub_dataset_not_found"
    assert files.list_files(platform, tenant.id).items == []
