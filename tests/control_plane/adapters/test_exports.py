"""From an adapter to files on the disk of whoever asked: the API, the process that makes them, the command line, a Hub."""

from __future__ import annotations

import json
import os
import tarfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import sqlalchemy as sa
from starlette.types import ASGIApp

from control_plane.adapters import exports
from control_plane.adapters import service as adapters
from control_plane.adapters.service import set_stage
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.adapters.tables import exports as exports_table
from control_plane.api.app import create_app
from control_plane.datasets.tables import files
from control_plane.jobs.tables import jobs
from control_plane.models.catalogue import Given, add_local, catalogue_of
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.worker.periodic_work import CLEANUP
from core.base_models import CHANGED
from core.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from engine.adapters.package import ADAPTER_WEIGHTS
from engine.adapters.record import FULL_MODEL
from engine.adapters.stages import Stage
from engine.evals.gate.verdict import Verdict
from engine.evals.scoring.report import EvalReport
from ft_client import FtClient
from ft_client.hub_upload import Pushed, Refused, Upload, upload
from resources.object_store import LocalObjectStore
from tests.support.jobs.registered_adapter import add_dataset
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.background_worker import working
from tests.support.platform.database_roles import as_owner
from tests.support.processes.ft_command import run_ft
from tests.support.servers.model_hub import TOKEN, ModelHub, running_model_hub

MODEL = "acme/Tiny-0.2"
REPORT = EvalReport(
    base_model=MODEL, base_digest="b", adapter_manifest_sha256="a", suite_digest="s", adapter_applied=True, max_logit_difference=1.0,
    literal=True, scores=(), golden_faults=(), samples=(), seconds=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def operated(platform: Platform, base: Path) -> Platform:
    """The module's platform with a base model that can be loaded."""
    add_local(platform.settings, MODEL, base, Given(license="Apache-2.0"))
    return replace(platform, models=catalogue_of(platform.settings))


@pytest.fixture
def url(operated: Platform, serve: Callable[[ASGIApp], str]) -> Iterator[str]:
    with working(operated):
        yield serve(create_app(operated))


@pytest.fixture
def owner(operated: Platform) -> tuple[str, str]:
    """A tenant and its key."""
    made, key = tenants.create(operated, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    return made.id, key.secret


def register(platform: Platform, tenant: str, base: Path, scratch: Path, *, seed: int = 0) -> str:
    """A registered adapter of a job that is done; its id."""
    job_id, file_id, now = f"ftjob-{uuid.uuid4().hex[:12]}", f"file-{uuid.uuid4().hex[:12]}", platform.clock()
    file = {"id": file_id, "tenant_id": tenant, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": "x", "object_key": "k"}
    job = {
        "id": job_id, "tenant_id": tenant, "state": "succeeded", "tier": "standard", "model": MODEL, "method": "sft", "suffix": "x",
        "base_digest": platform.models.get(MODEL).digest, "training_file": file_id, "seed": 0, "request": {}, "request_sha256": "r",
        "hyperparameters": {}, "dataset_id": "ds_1", "pack_fingerprint": "p", "spec": {"lock_sha256": "1" * 64, "commit": "c"},
        "spec_sha256": "5" * 64, "created_at": now,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(files).values(**file, status="processed", created_at=now))
        add_dataset(conn, tenant, "ds_1", now=now)
        conn.execute(sa.insert(jobs).values(**job))
    directory = build_tiny_adapter(scratch / uuid.uuid4().hex, base, base_name="trained-at", seed=seed)
    verdict = Verdict(outcome="passed", findings=())
    made, _ = adapters.register(
        platform, tenant=tenant, job_id=job_id, directory=directory, report=REPORT, verdict=verdict, eval_report_key="k"
    )
    return made.id


@pytest.mark.slow
def test_an_export_is_asked_for_made_and_downloaded_and_the_second_is_free(
    operated: Platform, url: str, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    name = adapters.get_adapter(operated, owner[0], adapter_id).name
    with FtClient(base_url=url, api_key=owner[1]) as client:
        assert client.adapters.retrieve(name)["id"] == adapter_id, "though the name holds a slash"
        asked = client.exports.create(name, format="gguf_adapter")
        ready = client.exports.wait(name, asked["id"])
        assert ready["status"] == "ready", ready["error"]
        assert ready["manifest"]["base"]["license"] == "Apache-2.0"
        sha256 = client.exports.download(adapter_id, asked["id"], tmp_path / "export.tar")
        assert sha256 == ready["sha256"]
        again = client.exports.create(adapter_id, format="gguf_adapter")
        assert (again.id, again.finished_at) == (asked["id"], ready["finished_at"])
        assert [e["id"] for e in client.exports.list(adapter_id).all()] == [asked["id"]]
    with tarfile.open(tmp_path / "export.tar") as tar:
        assert set(tar.getnames()) == {"adapter.gguf", "README.md", "manifest.json"}
    stored = [o.key for o in operated.objects.list(f"tenants/{owner[0]}/exports/{adapter_id}")]
    assert len(stored) == 1
    with FtClient(base_url=url, api_key=owner[1]) as client:
        client.exports.delete(name, asked["id"])
        assert client.exports.list(adapter_id).all() == []


def test_another_tenant_sees_nothing(operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    row = exports.request(operated, owner[0], adapter_id, format="tokenizer")
    assert exports.make(operated, owner[0], row.id) == "ready"
    other, _ = tenants.create(operated, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    uses: list[Callable[[], object]] = [
        lambda: exports.request(operated, other.id, adapter_id, format="adapter"),
        lambda: exports.get(operated, other.id, adapter_id, row.id),
        lambda: exports.content(operated, other.id, adapter_id, row.id),
    ]
    for use in uses:
        with pytest.raises(NotFound):
            use()


def test_an_order_whose_task_is_lost_gets_another(operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path) -> None:
    row = exports.request(operated, owner[0], register(operated, owner[0], base, tmp_path), format="tokenizer")
    of_order = {"id": row.id}
    with operated.engine.begin() as conn:
        conn.execute(sa.text("DELETE FROM tasks.procrastinate_jobs WHERE args ->> 'export_id' = :id"), of_order)
    assert CLEANUP.run(operated).count("lost tasks of exports added: 1") == 1
    assert CLEANUP.run(operated).count("lost tasks of exports added: 0") == 1
    with operated.engine.begin() as conn:
        added = conn.execute(sa.text("DELETE FROM tasks.procrastinate_jobs WHERE args ->> 'export_id' = :id RETURNING args"), of_order)
        assert added.scalar_one() == {"export_id": row.id, "tenant": owner[0]}
    assert exports.make(operated, "another", row.id) is None, "it is of another tenant"
    assert exports.make(operated, owner[0], row.id) == "ready"


def test_an_export_whose_maker_died_is_made_by_the_next(operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    row = exports.request(operated, owner[0], adapter_id, format="adapter")
    with pytest.raises(Conflict) as early:
        exports.content(operated, owner[0], adapter_id, row.id)
    assert early.value.code == "export_not_ready"
    with operated.engine.begin() as conn:
        conn.execute(sa.update(exports_table).where(exports_table.c.id == row.id).values(status="running", claim="of the dead"))
    assert exports.make(operated, owner[0], row.id) == "ready"
    assert exports.make(operated, owner[0], row.id) is None, "its task may be run twice"


@pytest.mark.slow
def test_a_changed_base_fails_the_export_and_it_can_be_asked_for_again(operated: Platform, owner: tuple[str, str], tmp_path: Path) -> None:
    own = build_tiny_model(tmp_path / "own", seed=4)
    settings = replace(operated.settings, home=tmp_path / "home")
    add_local(settings, MODEL, own, Given())
    mine = replace(operated, settings=settings, models=catalogue_of(settings))
    adapter_id = register(mine, owner[0], own, tmp_path)
    row = exports.request(mine, owner[0], adapter_id, format="tokenizer")
    weights = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(weights[:-1] + b"\0" if weights[-1:] != b"\0" else weights[:-1] + b"\1")
    assert exports.make(mine, owner[0], row.id) == "failed"
    assert exports.get(mine, owner[0], adapter_id, row.id).error["code"] == CHANGED
    (own / "model.safetensors").write_bytes(weights)
    again = exports.request(mine, owner[0], adapter_id, format="tokenizer")
    assert (again.id, again.status, again.error) == (row.id, "queued", None)
    assert exports.make(mine, owner[0], row.id) == "ready"


def test_what_cannot_be_exported_is_refused(operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    with pytest.raises(InvalidRequest, match="onnx"):
        exports.request(operated, owner[0], adapter_id, format="onnx")
    for seed in range(exports.MAX_PENDING):
        exports.request(operated, owner[0], register(operated, owner[0], base, tmp_path, seed=seed), format="tokenizer")
    with pytest.raises(QuotaExceeded) as many:
        exports.request(operated, owner[0], adapter_id, format="tokenizer")
    assert many.value.code == "too_many_exports"
    with operated.engine.begin() as conn:
        conn.execute(sa.delete(exports_table).where(exports_table.c.tenant_id == owner[0]))
        set_stage(conn, adapter_id, Stage.DEPRECATED, deprecated_at=operated.clock())
        set_stage(conn, adapter_id, Stage.ARCHIVED, archived_at=operated.clock())
    with pytest.raises(Conflict, match="is archived, so its files are deleted"):
        exports.request(operated, owner[0], adapter_id, format="tokenizer")


def test_a_whole_model_is_exported_on_a_device_and_only_its_tokenizer_by_the_worker(
    operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    whole = {"type": FULL_MODEL, "rank": None, "alpha": None, "modules": None}
    with as_owner(operated).begin() as conn:
        conn.execute(sa.text("ALTER TABLE adapters DISABLE TRIGGER USER"))
        conn.execute(sa.update(adapters_table).where(adapters_table.c.id == adapter_id).values(**whole))
        conn.execute(sa.text("ALTER TABLE adapters ENABLE TRIGGER USER"))
    with pytest.raises(InvalidRequest, match="whole model and has no adapter"):
        exports.request(operated, owner[0], adapter_id, format="gguf_adapter")
    assert exports.request(operated, owner[0], adapter_id, format="adapter").expected_s is not None
    order = exports.request(operated, owner[0], adapter_id, format="tokenizer")
    exports.make(operated, owner[0], order.id)
    assert exports.get(operated, owner[0], adapter_id, order.id).status == "ready"
    assert not list(operated.settings.adapters_dir.glob(f"{adapter_id}*"))


def ft(url: str, key: str, home: Path, *args: str, hub: ModelHub | None = None) -> CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "HF_"))}
    env |= {"FT_API_URL": url, "FT_API_KEY": key, "FT_HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    env |= {"FT_HUB_ENDPOINT": hub.endpoint} if hub else {}
    return run_ft(*args, env=env, cwd=home)


def test_the_command_line_takes_an_adapter_along_and_pushes_it(
    operated: Platform, url: str, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    done = ft(url, owner[1], tmp_path, "export", adapter_id, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["adapter"]["id"] == adapter_id
    assert "not empty" in ft(url, owner[1], tmp_path, "export", adapter_id, "-o", str(tmp_path / "out")).stderr
    with running_model_hub() as hub:
        pushed = ft(url, owner[1], tmp_path, "export", adapter_id, "--push", "acme/mine", "--token", TOKEN, "--json", hub=hub)
        assert pushed.returncode == 0, pushed.stderr
        there = hub.repos["acme/mine"]
        assert there[ADAPTER_WEIGHTS] == (tmp_path / "out" / ADAPTER_WEIGHTS).read_bytes()
        assert there["manifest.json"] == (tmp_path / "out" / "manifest.json").read_bytes()
        assert {asked[2] for asked in hub.asked if asked[0] == "POST"} == {f"Bearer {TOKEN}"}
        refused = ft(
            url,
            owner[1],
            tmp_path,
            "export",
            adapter_id,
            "-o",
            str(tmp_path / "both"),
            "--push",
            "acme/mine",
            "--token",
            "hf_wrong",
            hub=hub,
        )
        assert refused.returncode == 1
        assert "hub_push_refused" in refused.stderr
        again = ft(
            url, owner[1], tmp_path, "export", adapter_id, "-o", str(tmp_path / "both"), "--push", "acme/mine", "--token", TOKEN, hub=hub
        )
        assert again.returncode == 0, "the refused push left nothing in the way"
        assert {path.name for path in (tmp_path / "both").iterdir()} == {path.name for path in (tmp_path / "out").iterdir()}
        assert "no_hub_token" in ft(url, owner[1], tmp_path, "export", adapter_id, "--push", "acme/mine", hub=hub).stderr


class Watched(LocalObjectStore):
    """A store whose uploads take as long as the test says."""

    def __init__(self, root: Path, during: Callable[[], None]) -> None:
        super().__init__(root)
        self.during = during

    def put_file(self, key: str, path: Path) -> None:
        self.during()
        super().put_file(key, path)


def with_uploads(platform: Platform, during: Callable[[], None]) -> Platform:
    assert isinstance(platform.objects, LocalObjectStore)
    return replace(platform, objects=Watched(platform.objects.root, during))


def test_a_maker_whose_order_was_taken_over_says_nothing_of_it(
    operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    row = exports.request(operated, owner[0], register(operated, owner[0], base, tmp_path), format="tokenizer")

    def taken_over() -> None:
        with operated.engine.begin() as conn:
            conn.execute(sa.update(exports_table).where(exports_table.c.id == row.id).values(claim="another"))

    assert exports.make(with_uploads(operated, taken_over), owner[0], row.id) is None
    found = exports.get(operated, owner[0], row.adapter_id, row.id)
    assert (found.status, found.claim) == ("running", "another")
    exports.delete(operated, owner[0], row.adapter_id, row.id)


def test_an_export_that_is_deleted_is_gone_with_its_archive_also_while_it_is_made(
    operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    row = exports.request(operated, owner[0], adapter_id, format="tokenizer")
    other, _ = tenants.create(operated, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with pytest.raises(NotFound):
        exports.delete(operated, other.id, adapter_id, row.id)
    delete = lambda: exports.delete(operated, owner[0], adapter_id, row.id)  # noqa: E731
    assert exports.make(with_uploads(operated, delete), owner[0], row.id) is None
    assert list(operated.objects.list(f"tenants/{owner[0]}/exports")) == []
    again = exports.request(operated, owner[0], adapter_id, format="tokenizer")
    assert exports.make(operated, owner[0], again.id) == "ready"
    exports.delete(operated, owner[0], adapter_id, again.id)
    assert list(operated.objects.list(f"tenants/{owner[0]}/exports")) == []
    assert exports.list_exports(operated, owner[0], adapter_id) == []


def test_an_export_is_kept_for_a_week_and_made_again_on_request(
    operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    adapter_id = register(operated, owner[0], base, tmp_path)
    row = exports.request(operated, owner[0], adapter_id, format="tokenizer")
    assert exports.make(operated, owner[0], row.id) == "ready"
    exports.expire(replace(operated, clock=lambda: operated.clock() + exports.KEPT_FOR - timedelta(minutes=1)))
    assert exports.get(operated, owner[0], adapter_id, row.id).status == "ready"
    exports.expire(replace(operated, clock=lambda: operated.clock() + exports.KEPT_FOR + timedelta(minutes=1)))
    assert list(operated.objects.list(f"tenants/{owner[0]}/exports")) == []
    again = exports.request(operated, owner[0], adapter_id, format="tokenizer")
    assert (again.id == row.id, again.status) == (False, "queued")
    exports.delete(operated, owner[0], adapter_id, again.id)


def test_of_many_requests_at_once_as_many_enter_as_there_is_room_for(
    operated: Platform, base: Path, owner: tuple[str, str], tmp_path: Path
) -> None:
    known = [register(operated, owner[0], base, tmp_path, seed=seed) for seed in range(exports.MAX_PENDING + 4)]

    def entered(adapter_id: str) -> bool:
        try:
            return bool(exports.request(operated, owner[0], adapter_id, format="adapter"))
        except QuotaExceeded:
            return False

    with ThreadPoolExecutor(len(known)) as pool:
        assert sum(pool.map(entered, known)) == exports.MAX_PENDING
    with operated.engine.begin() as conn:
        conn.execute(sa.delete(exports_table).where(exports_table.c.tenant_id == owner[0]))


def test_nothing_is_pushed_into_a_repository_that_everybody_reads_unless_that_is_said(base: Path) -> None:
    with running_model_hub() as hub:
        hub.repos["acme/open"] = {}
        request = Upload(endpoint=hub.endpoint, token=TOKEN, repo="acme/open", directory=str(base), message="m", private=True)
        assert upload(request) == Refused(error="public", detail="")
        assert hub.repos["acme/open"] == {}
        anyone = replace(request, private=False)
        assert isinstance(upload(anyone), Pushed)
        assert upload(anyone, timeout_s=0.01) == Refused(error="unreachable", detail="the upload did not end within 0.01 s")
