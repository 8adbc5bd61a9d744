"""The operator's base models: pinned when they are added, held to it, deprecated without harm, removed when nobody needs them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import sqlalchemy as sa
import yaml

from control_plane.adapters.tables import adapters as adapters_table
from control_plane.attempts import start
from control_plane.attempts.service import claim, finish
from control_plane.attempts.tables import attempts
from control_plane.billing.tables import ledger_entries
from control_plane.jobs import service as jobs
from control_plane.jobs import transitions
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import transition
from control_plane.models import catalogue
from control_plane.models import service as models
from control_plane.models.catalogue import Given, add_local
from control_plane.models.operator_catalogue import edited
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations
from control_plane.tenants.rules import Tenant
from core.base_models import CHANGED, catalogue_file
from core.errors import Conflict, Fault, IntegrityError, InvalidRequest
from ft_assets.datasets import step
from resources.launcher import LocalLauncher
from tests.support.jobs.finished_job import rewrite
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.database_roles import as_owner
from tests.support.processes.ft_command import run_ft
from tests.support.servers.model_hub import SHA, running_model_hub

MODEL = "acme/Tiny-0.2-Instruct"


@pytest.fixture
def operated(platform: Platform, tmp_path: Path) -> Platform:
    """A platform over an empty operator's catalogue of its own."""
    settings = replace(platform.settings, home=tmp_path / "home")
    return replace(platform, settings=settings, models=catalogue.catalogue_of(settings))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "tiny")


def change_unseen(file: Path) -> None:
    """Flip the last bit and set the time of change back, as a clumsy repair or a failing disk would."""
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def submit(platform: Platform, tenant: Tenant, training_file: str, *, model: str = MODEL) -> str:
    request = JobRequest.from_body({"model": model, "training_file": training_file})
    return str(jobs.submit(platform, tenant.id, request).job.id)


def row(platform: Platform, job_id: str) -> sa.RowMapping:
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).mappings().one()


def test_a_model_is_pinned_when_it_is_added_and_shown_with_what_is_known_of_it(operated: Platform, tenant: Tenant, tiny: Path) -> None:
    made = add_local(operated.settings, MODEL, tiny, Given(license="MIT", context_length=256))
    assert (made.context_length, made.license) == (256, "MIT")
    assert catalogue.verify(operated.settings, MODEL).digest == made.digest
    card = models.get(operated, tenant.id, MODEL)
    assert (card.license, card.context_length, card.digest, card.num_parameters) == ("MIT", 256, made.digest, made.num_parameters)
    assert add_local(operated.settings, MODEL, tiny, Given()).digest == made.digest, "the same bytes may be added again"
    with pytest.raises(Conflict) as other:
        add_local(operated.settings, MODEL, build_tiny_model(tiny.parent / "other", seed=1), Given())
    assert other.value.code == "model_exists"


@pytest.mark.parametrize("model_id", ["ft:x", "a/b/c", "../x", "a b", "", "-x", "x" * 97])
def test_an_id_that_is_no_name_is_refused(operated: Platform, tiny: Path, model_id: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        add_local(operated.settings, model_id, tiny, Given())
    assert refused.value.code == "invalid_id"


def test_a_context_beyond_the_models_own_is_refused(operated: Platform, tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"513 is outside 1\.\.512"):
        add_local(operated.settings, MODEL, tiny, Given(context_length=513))


def test_a_model_of_a_hub_is_fetched_pinned_and_removed_with_its_files(operated: Platform, tiny: Path) -> None:
    with running_model_hub() as hub:
        hub.repos["acme/tiny"] = {p.name: p.read_bytes() for p in tiny.iterdir()} | {"README.md": b"---\nlicense: apache-2.0\n---\n"}
        settings = replace(operated.settings, hub_endpoint=hub.endpoint)
        made = catalogue.add_from_hub(settings, MODEL, repo="acme/tiny", revision=SHA, given=Given())
    assert (made.repo, made.revision, made.license) == ("acme/tiny", SHA, "apache-2.0")
    found = operated.models.get(MODEL, fresh=True)
    assert (found.digest, found.revision) == (made.digest, SHA)
    assert found.directory is not None
    assert found.directory.parent == settings.models_dir
    assert catalogue.remove(operated, MODEL) == found.directory
    assert not found.directory.exists()


def test_what_an_interrupted_removal_leaves_is_fetched_again(operated: Platform, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_model_hub() as hub:
        hub.repos["acme/tiny"] = {p.name: p.read_bytes() for p in tiny.iterdir()} | {"README.md": b""}
        settings = replace(operated.settings, hub_endpoint=hub.endpoint)
        made = catalogue.add_from_hub(settings, MODEL, repo="acme/tiny", revision=SHA, given=Given())
        assert made.directory is not None

        def interrupted(directory: Path, **_: object) -> None:
            (directory / "model.safetensors").unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", interrupted)
            with pytest.raises(KeyboardInterrupt):
                catalogue.remove(operated, MODEL)
        again = catalogue.add_from_hub(settings, MODEL, repo="acme/tiny", revision=SHA, given=Given())
    assert again.digest == made.digest


def test_changed_weights_are_refused_at_submission_and_fail_what_was_submitted(
    operated: Platform, tenant: Tenant, tiny: Path, training_file: str
) -> None:
    add_local(operated.settings, MODEL, tiny, Given())
    job_id = submit(operated, tenant, training_file)
    change_unseen(tiny / "model.safetensors")
    for use in (lambda: submit(operated, tenant, training_file), lambda: step.pack(operated, tenant.id, job_id)):
        with pytest.raises(IntegrityError) as changed:
            use()
        assert (changed.value.code, changed.value.fault) == (CHANGED, Fault.PLATFORM)
    transitions.fail(operated, tenant.id, job_id, changed.value)
    assert row(operated, job_id)["error"]["code"] == CHANGED


def test_an_unpinned_model_that_changed_is_no_longer_what_the_job_was_promised(
    operated: Platform, tenant: Tenant, tiny: Path, training_file: str
) -> None:
    loose = replace(operated, models=type(operated.models)({MODEL: ({"id": MODEL, "path": str(tiny)}, tiny)}))
    job_id = submit(loose, tenant, training_file)
    change_unseen(tiny / "tokenizer.json")
    with pytest.raises(IntegrityError, match="was pinned when it was chosen"):
        step.pack(loose, tenant.id, job_id)


def test_training_does_not_begin_on_changed_weights_and_the_job_fails_unbilled(
    operated: Platform, tenant: Tenant, tiny: Path, training_file: str
) -> None:
    add_local(operated.settings, MODEL, tiny, Given())
    job_id = submit(operated, tenant, training_file)
    step.pin_dataset(operated, tenant.id, job_id)
    step.pack(operated, tenant.id, job_id)
    now = operated.clock()
    with operated.engine.begin() as conn:
        transition(conn, job_id, JobState.PROVISIONING, message="Granted.", now=now, attempt=1)
        conn.execute(sa.insert(reservations).values(job_id=job_id, attempt=1, pool="local", num_gpus=1, granted_at=now))
        conn.execute(sa.insert(attempts).values(job_id=job_id, attempt=1, workload=f"{job_id}-a1"))
    change_unseen(tiny / "model.safetensors")
    launcher = LocalLauncher(operated.settings.work_dir / "launcher")
    held = claim(operated, tenant.id, job_id)
    ending = start.start_or_adopt(operated, launcher, held)
    assert ending is not None and ending.failure is not None
    assert (ending.outcome, ending.failure.fault) == (CHANGED, Fault.PLATFORM)
    assert finish(operated, held, ending) is JobState.FAILED
    assert row(operated, job_id)["error"]["code"] == CHANGED
    assert launcher.get(held.workload).started_at is None, "no process was started"
    with operated.engine.connect() as conn:
        assert conn.execute(sa.select(ledger_entries).where(ledger_entries.c.job_id == job_id)).all() == []


def test_a_deprecated_model_takes_no_new_job_and_lets_the_old_ones_finish(
    operated: Platform, tenant: Tenant, tiny: Path, training_file: str
) -> None:
    add_local(operated.settings, MODEL, tiny, Given())
    job_id = submit(operated, tenant, training_file)
    today = operated.clock().date()
    catalogue.deprecate(operated.settings, MODEL, today + timedelta(days=1))
    submit(operated, tenant, training_file)
    catalogue.deprecate(operated.settings, MODEL, today)
    with pytest.raises(InvalidRequest) as refused:
        submit(operated, tenant, training_file)
    assert refused.value.code == "model_deprecated"
    step.pin_dataset(operated, tenant.id, job_id)
    step.pack(operated, tenant.id, job_id)
    assert row(operated, job_id)["state"] == JobState.QUEUED
    assert models.get(operated, tenant.id, MODEL).deprecated_since == today
    catalogue.deprecate(operated.settings, MODEL, None)
    submit(operated, tenant, training_file)


def test_a_model_that_ships_can_be_deprecated_by_the_operator(operated: Platform) -> None:
    if not (Path(__file__).parents[3] / "examples/demo/base_model/config.json").exists():
        pytest.skip("the demo model is not built")
    shipped = operated.models.get("demo-llama-3m")
    today = operated.clock().date()
    catalogue.deprecate(operated.settings, "demo-llama-3m", today)
    now = operated.models.get("demo-llama-3m")
    assert (now.digest, now.deprecated_since) == (shipped.digest, today)
    catalogue.remove(operated, "demo-llama-3m")
    assert operated.models.get("demo-llama-3m") == shipped


def test_a_model_in_use_stays(operated: Platform, tenant: Tenant, tiny: Path, training_file: str) -> None:
    used = "acme/used-here-alone"
    add_local(operated.settings, used, tiny, Given())
    job_id = submit(operated, tenant, training_file, model=used)
    with pytest.raises(Conflict, match=job_id) as refused:
        catalogue.remove(operated, used)
    assert refused.value.code == "model_in_use"
    jobs.cancel(operated, tenant.id, job_id)
    name = f"ft:{used}:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    adapter_id = add_adapter(operated, tenant.id, name=name, stage="draft", loaded=False, base_model=used)
    with pytest.raises(Conflict, match=adapter_id):
        catalogue.remove(operated, used)
    with as_owner(operated).begin() as conn:
        rewrite(conn, adapters_table.c.id == adapter_id, base_model="tiny-base")
    assert catalogue.remove(operated, used) is None
    assert tiny.exists()
    assert used not in operated.models.ids()


@pytest.mark.slow
def test_operators_keep_models_from_the_command_line(tiny: Path, tmp_path: Path) -> None:
    env = {**os.environ, "FT_HOME": str(tmp_path / "home")}
    ft: Callable[..., CompletedProcess[str]] = lambda *args: run_ft("admin", "models", *args, env=env, cwd=tmp_path)  # noqa: E731
    added = ft("add", MODEL, "--path", str(tiny), "--license", "MIT")
    assert added.returncode == 0, added.stderr
    assert MODEL in ft("list").stdout
    assert '"verified": true' in ft("verify", MODEL, "--json").stdout
    assert "2026-01-01" in ft("deprecate", MODEL, "--since", "2026-01-01").stdout
    change_unseen(tiny / "model.safetensors")
    broken = ft("verify", MODEL)
    assert broken.returncode == 1
    assert "base_model_changed" in broken.stderr


def test_an_entry_of_another_catalogue_keeps_its_files_when_it_is_deprecated_and_removed(platform: Platform, tmp_path: Path) -> None:
    name, beside = "acme/beside", tmp_path / "beside"
    model = build_tiny_model(beside / "m")
    entry = {"id": name, "path": "m", "repo": "acme/m", "revision": "a" * 40, "license": "mit"}
    (beside / "catalogue.yaml").write_text(yaml.safe_dump({"models": [entry]}))
    settings = replace(platform.settings, home=tmp_path / "home", base_models=(beside / "catalogue.yaml",))
    mine = replace(platform, settings=settings, models=catalogue.catalogue_of(settings))
    before = mine.models.get(name)
    catalogue.deprecate(settings, name, mine.clock().date())
    assert mine.models.get(name).directory == before.directory == model
    catalogue.deprecate(settings, name, None)
    assert mine.models.get(name) == before
    assert catalogue.remove(mine, name) is None
    assert model.is_dir()


@pytest.mark.parametrize("path", ["../precious", ".", "link"])
def test_only_what_was_fetched_is_deleted(operated: Platform, tmp_path: Path, path: str) -> None:
    models_dir = operated.settings.models_dir
    precious = models_dir / "../precious"
    models_dir.mkdir(parents=True)
    precious.mkdir()
    (models_dir / "link").symlink_to(precious.resolve())
    with edited(catalogue_file(models_dir)) as entries:
        entries["x"] = {"id": "x", "path": path}
    assert catalogue.remove(operated, "x") is None
    assert precious.is_dir()
    assert catalogue_file(models_dir).is_file()
