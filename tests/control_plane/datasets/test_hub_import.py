"""A dataset of a Hub becomes a file of the tenant: named at once, fetched behind the answer, validated like any upload."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.datasets import hub, validation_state, validation_tasks
from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.platform.tables import metadata
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, InvalidRequest, QuotaExceeded
from ft_client import FtClient
from tests.engine.data.readers.test_hub import SHA, TOKEN, Hub
from tests.support.platform.background_worker import pass_time, work_off, working
from tests.support.platform.lock_waits import wait_for_a_lock

PUBLIC, PRIVATE = f"hf://acme/sums@{SHA}", f"hf://acme/secret@{SHA}"


@pytest.fixture
def server() -> Iterator[Hub]:
    made = Hub()
    rows = [{"q": f"What is {i} plus {i}?", "a": f"It is {2 * i}. Ask jane.doe@example.com."} for i in range(120)]
    for name in ("acme/sums", "acme/secret"):
        made.repos[name] = {"train.jsonl": "".join(json.dumps(r) + "\n" for r in rows).encode()}
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def near(platform: Platform, server: Hub) -> Platform:
    """A platform beside a Hub, whose operator has a token of its own for it."""
    return replace(platform, settings=replace(platform.settings, hub_endpoint=server.endpoint, hub_token="hf_theOperators"))


def worked_off(platform: Platform, file: Any) -> Any:
    """The file, once the worker has done what there is to do."""
    work_off(platform)
    return uploaded_files.find(platform, file.id)


def test_an_import_is_a_validated_file_that_says_where_it_is_from(near: Platform, tenant: Tenant, server: Hub) -> None:
    made = hub.import_dataset(near, tenant.id, hub_id=PUBLIC, column_map={"q": "prompt", "a": "completion"}, policies={"pii": "redact"})
    assert (made.status, made.source, made.bytes) == ("uploaded", f"hf://datasets/acme/sums@{SHA}:train", 0)
    assert server.asked == [], "nothing is fetched before the answer"
    with pytest.raises(Conflict) as early:
        uploaded_files.content(near, tenant.id, made.id)
    assert early.value.code == "file_not_fetched"
    seen: list[str] = []
    with working(near):
        file = uploaded_files.wait_until_validated(near, made.id, progress=lambda p: seen.append(p.stage))
    assert (file.status, file.filename) == ("processed", "train.jsonl")
    assert file.bytes == len(server.repos["acme/sums"]["train.jsonl"])
    assert seen[0] == validation_state.FETCHING
    assert file.report["examples"] > 100
    assert file.report["stats"]["personal_data"]["rows"] == 120
    with uploaded_files.content(near, tenant.id, made.id)[1] as stream:
        assert stream.read() == server.repos["acme/sums"]["train.jsonl"]


def test_an_import_that_cannot_be_is_refused_with_the_reason(near: Platform, tenant: Tenant) -> None:
    with pytest.raises(InvalidRequest, match=SHA) as branch:
        hub.import_dataset(near, tenant.id, hub_id="hf://acme/sums@main")
    assert branch.value.code == "hub_revision_not_pinned"
    assert uploaded_files.list_files(near, tenant.id).items == []
    absent = worked_off(near, hub.import_dataset(near, tenant.id, hub_id=f"hf://acme/nothing@{SHA}"))
    assert (absent.status, absent.status_code, absent.dataset_id) == ("error", "hub_dataset_not_found", None)


def test_the_operators_token_is_not_for_tenants_and_their_own_is_stored_nowhere(near: Platform, tenant: Tenant, server: Hub) -> None:
    server.gated = {"acme/secret"}
    closed = worked_off(near, hub.import_dataset(near, tenant.id, hub_id=PRIVATE))
    assert (closed.status, closed.status_code) == ("error", "hub_dataset_gated")
    assert "hf_theOperators" not in str(server.asked)
    mapping = {"q": "prompt", "a": "completion"}
    made = hub.import_dataset(near, tenant.id, hub_id=PRIVATE, column_map=mapping, hub_token=TOKEN)
    with near.engine.connect() as conn:
        tasks = str(conn.execute(sa.text("SELECT * FROM tasks.procrastinate_jobs")).all())
    assert made.id in tasks and TOKEN not in tasks, "it is encrypted until it is used"
    assert worked_off(near, made).status == "processed"
    with near.engine.connect() as conn:
        assert made.id not in str(conn.execute(sa.text("SELECT * FROM tasks.procrastinate_jobs")).all())
    assert f"Bearer {TOKEN}" in [authorization for *_, authorization in server.asked], "it was used"
    with near.engine.connect() as conn:
        stored = [str(row) for table in metadata.sorted_tables for row in conn.execute(sa.select(table))]
    assert len(stored) > 3
    assert not [row for row in stored if TOKEN in row]
    kept = [p for p in near.settings.home.rglob("*") if p.is_file()]
    assert kept
    assert not [p for p in kept if TOKEN.encode() in p.read_bytes()]


def test_an_import_whose_token_no_key_decrypts_is_refused(near: Platform, tenant: Tenant, server: Hub, tmp_path: Path) -> None:
    made = hub.import_dataset(near, tenant.id, hub_id=PRIVATE, hub_token=TOKEN)
    refused = worked_off(replace(near, settings=replace(near.settings, secrets_key_file=tmp_path / "another.key")), made)
    assert (refused.status, refused.status_code) == ("error", "hub_token_needed")
    assert "import it again with the token" in refused.status_details
    assert server.asked == []


@pytest.mark.slow
def test_an_import_whose_key_file_others_can_read_is_fetched_once_that_is_mended(near: Platform, tenant: Tenant, tmp_path: Path) -> None:
    key_file = tmp_path / "open.key"
    near = replace(near, settings=replace(near.settings, secrets_key_file=key_file))
    made = hub.import_dataset(near, tenant.id, hub_id=PRIVATE, column_map={"q": "prompt", "a": "completion"}, hub_token=TOKEN)
    key_file.chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path)
    other = replace(near, settings=replace(near.settings, secrets_key_file=tmp_path / "link" / "open.key"))  # as this process has read it
    assert worked_off(other, made).status == "uploaded"
    key_file.chmod(0o600)
    pass_time(near, 60)
    assert worked_off(other, made).status == "processed"


def test_an_import_whose_task_is_lost_gets_another(near: Platform, tenant: Tenant) -> None:
    made = hub.import_dataset(near, tenant.id, hub_id=PUBLIC, column_map={"q": "prompt", "a": "completion"})
    with near.engine.begin() as conn:
        conn.execute(sa.text("DELETE FROM tasks.procrastinate_jobs"))
    assert [validation_tasks.add_lost(near), validation_tasks.add_lost(near)] == [1, 0]
    assert worked_off(near, made).status == "processed"


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_no_fault_of_the_file(near: Platform, tenant: Tenant) -> None:
    made = hub.import_dataset(near, tenant.id, hub_id=PUBLIC, column_map={"q": "prompt", "a": "completion"})
    cut_off = replace(near, settings=replace(near.settings, hub_endpoint="http://127.0.0.1:9"))
    refused = worked_off(cut_off, made)
    assert (refused.status, refused.status_code) == ("error", "hub_unavailable")
    assert uploaded_files.validate_again(near, tenant.id, made.id).status == "uploaded"
    assert worked_off(near, made).status == "processed"


def test_imports_that_are_ordered_at_once_are_counted_one_after_the_other(near: Platform, tenant: Tenant) -> None:
    for _ in range(hub.MAX_PENDING - 1):
        hub.import_dataset(near, tenant.id, hub_id=PUBLIC)
    waiting = list[Future[Any]]()

    def counted(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if "count(*)" in statement and "FROM files" in statement and not waiting:
            waiting.append(pool.submit(hub.import_dataset, near, tenant.id, hub_id=PUBLIC))
            wait_for_a_lock(near)

    sa.event.listen(near.engine, "after_cursor_execute", counted)
    try:
        with ThreadPoolExecutor(1) as pool:
            hub.import_dataset(near, tenant.id, hub_id=PUBLIC)
    finally:
        sa.event.remove(near.engine, "after_cursor_execute", counted)
    with pytest.raises(QuotaExceeded, match=f"{hub.MAX_PENDING} imports wait"):
        waiting[0].result()


def test_a_tenant_has_a_bounded_number_of_imports_in_line(near: Platform) -> None:
    busy, other = (tenants.create(near, name)[0].id for name in ("busy", "other"))
    made = [hub.import_dataset(near, busy, hub_id=PUBLIC).id for _ in range(hub.MAX_PENDING)]
    with pytest.raises(QuotaExceeded) as refused:
        hub.import_dataset(near, busy, hub_id=PUBLIC)
    assert refused.value.code == "too_many_imports"
    hub.import_dataset(near, other, hub_id=PUBLIC)
    uploaded_files.delete(near, busy, made[0])
    hub.import_dataset(near, busy, hub_id=PUBLIC)


def test_an_import_over_the_wire_is_answered_at_once_and_followed_to_its_end(
    near: Platform, tenant: Tenant, server: Hub, api_key: str, serve: Callable[[ASGIApp], str]
) -> None:
    server.gated = {"acme/secret"}
    with working(near), FtClient(base_url=serve(create_app(near)), api_key=api_key) as ft:
        made = ft.datasets.import_from_hub(hub_id=PRIVATE, column_map={"q": "prompt", "a": "completion"}, hub_token=TOKEN)
        assert (made["status"], made["bytes"]) == ("uploaded", 0)
        assert TOKEN not in json.dumps(made)
        assert [e["status"] for e in ft.files.events(made["id"])][-1] == "processed"
        assert ft.files.retrieve(made["id"])["bytes"] > 0
