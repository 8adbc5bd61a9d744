"""The index of served adapters follows the desired state, for each digest of a base."""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters.service import get_adapter
from control_plane.adapters.tables import Adapter
from control_plane.evaluations.tables import evaluations
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Replica
from control_plane.serving import node_files
from control_plane.serving.node_files import materialise
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from engine.adapters import package, serving_index
from tests.support.models.tiny_model import build_tiny_model
from tests.vllm.customer import Customer

OTHER = "f" * 64


@pytest.fixture
def customer(new_platform: Callable[..., Platform], tmp_path: Path) -> Customer:
    base = build_tiny_model(tmp_path / "base")
    platform = replace(new_platform(), models=Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)}))
    made, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    return Customer(platform=platform, id=made.id, base=base, scratch=tmp_path)


def serving(customer: Customer, digest: str | None = None) -> Replica:
    own = customer.platform.models.get("tiny").digest
    return Replica(url="http://one", ready=True, base="tiny", base_digest=digest or own, adapters={})


def give_verdict(customer: Customer, adapter: Adapter, outcome: str) -> None:
    now = customer.platform.clock()
    of = {"tenant_id": customer.id, "job_id": adapter.job_id, "adapter_id": adapter.id, "base_model": "tiny", "base_digest": OTHER}
    done = {"state": "succeeded", "outcome": outcome, "created_at": now, "finished_at": now, "kind": "base_update"}
    with customer.platform.engine.begin() as conn:
        conn.execute(sa.insert(evaluations).values(id=f"ev-{uuid.uuid4().hex}", **of, **done))


def read(customer: Customer, digest: str | None = None) -> Any:
    name = serving_index.index_filename(digest or customer.platform.models.get("tiny").digest)
    return json.loads((customer.platform.settings.work_dir / "adapters" / name).read_bytes())


def test_what_is_desired_is_in_the_index_and_what_is_withdrawn_is_not(customer: Customer) -> None:
    one, two, draft = (customer.register(customer.trained(seed=seed)) for seed in (1, 2, 3))
    for made in (one, two):
        promotions.promote(customer.platform, customer.id, made.id)
    node_files.write(customer.platform, [serving(customer)])
    assert read(customer)[one.name] == {
        "directory": one.id, "manifest_sha256": one.manifest_sha256, "base_digest": one.base_digest,
    }  # fmt: skip
    assert set(read(customer)) == {one.name, two.name} and draft.name not in read(customer)
    promotions.deprecate(customer.platform, customer.id, one.id)
    node_files.write(customer.platform, [])
    assert set(read(customer)) == {two.name}
    promotions.deprecate(customer.platform, customer.id, two.id)
    node_files.write(customer.platform, [])
    assert read(customer) == {}


def test_servers_of_other_bytes_read_another_index_with_what_was_made_for_them(customer: Customer) -> None:
    made = promotions.promote(customer.platform, customer.id, customer.register(customer.trained()).id)
    where = materialise(customer.platform, get_adapter(customer.platform, customer.id, made.id), OTHER)
    node_files.write(customer.platform, [serving(customer), serving(customer, OTHER)])
    assert read(customer, OTHER) == {}, "it is not accepted there"
    give_verdict(customer, made, "passed")
    node_files.write(customer.platform, [serving(customer), serving(customer, OTHER)])
    sha256 = hashlib.sha256((where / package.PACKAGE_MANIFEST).read_bytes()).hexdigest()
    assert read(customer, OTHER) == {made.name: {"directory": where.name, "manifest_sha256": sha256, "base_digest": OTHER}}
    assert sha256 != made.manifest_sha256
    assert set(read(customer)) == {made.name}
    give_verdict(customer, made, "quarantined")
    node_files.write(customer.platform, [serving(customer), serving(customer, OTHER)])
    assert (read(customer, OTHER), set(read(customer))) == ({}, {made.name}), "its own base needs no verdict"


def test_while_nothing_changes_the_database_is_all_that_is_read(customer: Customer) -> None:
    made = promotions.promote(customer.platform, customer.id, customer.register(customer.trained()).id)
    materialise(customer.platform, get_adapter(customer.platform, customer.id, made.id), OTHER)
    give_verdict(customer, made, "passed")
    replicas = [serving(customer), serving(customer, OTHER)]
    node_files.write(customer.platform, replicas)
    opened: list[str] = []
    root = str(customer.platform.settings.work_dir / "adapters")
    watching = True
    sys.addaudithook(lambda event, args: opened.append(args[0]) if watching and event == "open" and root in str(args[0]) else None)
    node_files.write(customer.platform, replicas)
    assert opened == []
    index = customer.platform.settings.work_dir / "adapters" / serving_index.index_filename(OTHER)
    index.write_text("{}")
    node_files.write(customer.platform, replicas)
    watching = False
    assert set(read(customer, OTHER)) == {made.name}, "an index that was changed is mended"
    assert str(index) in map(str, opened)


def test_a_disk_that_takes_no_index_stops_no_rollout(customer: Customer, caplog: pytest.LogCaptureFixture) -> None:
    (customer.platform.settings.work_dir).mkdir(parents=True, exist_ok=True)
    (customer.platform.settings.work_dir / "adapters").write_text("not a directory")
    node_files.write(customer.platform, [serving(customer)])
    assert "the index of served adapters was not written" in caplog.text
