"""The upgrade drill: a home of the previous release, with a job that trains, goes on with this version."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from resources.database import migrate
from tests.journey.conftest import ROOT, Stack, environment, started
from tests.journey.test_restore import PATIENT, QUESTION, REQUEST, UP_S, ended, resumed_from, until, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RELEASE = "ae5cf393ad56c66747708a8a8148f8baa367888a"
"""Commit of release 0.1.0."""
ITS_FT = (sys.executable, "-P", "-m", "control_plane.cli")
"""Its ``ft``, found by PYTHONPATH; the installed script is this version's."""


def git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-c", "safe.directory=*", *args], capture_output=True, text=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with the release's code in `released`."""
    made = Path(tempfile.mkdtemp(prefix="ft-upgrade-"))
    made.chmod(0o711)  # as root, the database's user passes through it
    cloned = git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(made / "released"))
    assert cloned.returncode == 0, cloned.stderr
    if git("-C", str(made / "released"), "checkout", "--quiet", RELEASE).returncode:
        shutil.rmtree(made)
        pytest.skip(f"this clone has no commit {RELEASE[:12]}, the previous release; fetch the whole history")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def schema(stack: Stack) -> str:
    return str(httpx.get(f"{stack.endpoints['api']}/readyz").json()["schema"])


def test_a_home_of_the_previous_release_goes_on_with_this_version(folder: Path, tickets: Path) -> None:
    home = folder / "home"
    env = environment(home) | PATIENT
    with started(home, env | {"PYTHONPATH": str(folder / "released")}, seconds=UP_S, command=ITS_FT) as stack:
        key = json.loads(stack.ft("admin", "tenants", "create", "drill", "--tier", "standard", "--json").stdout)["api_key"]
        client = stack.client(key)
        file = client.files.create(file=tickets, purpose="fine-tune")
        twin = until(client, client.fine_tuning.jobs.create(training_file=file.id, suffix="twin", **REQUEST).id, ended)
        assert twin.status == "succeeded", twin.error
        before = client.chat.completions.create(model=twin.fine_tuned_model, **QUESTION).choices[0].message.content
        trained = weights(home, twin)
        job_id = client.fine_tuning.jobs.create(training_file=file.id, suffix="upgraded", **REQUEST).id
        running = until(client, job_id, lambda job: list(client.with_options(max_retries=10).fine_tuning.jobs.checkpoints.list(job.id)))
        assert schema(stack) != migrate.head(), "nothing is upgraded"

    with started(home, env, seconds=UP_S) as stack:
        client = stack.client(key)
        assert schema(stack) == migrate.head()
        upgraded = until(client, job_id, ended)
        assert upgraded.status == "succeeded", upgraded.error
        assert upgraded.attempt == running.attempt + 1
        assert resumed_from(home, upgraded) >= 4, "it begins at a checkpoint, and not at the start"
        assert weights(home, upgraded) == trained, "on one machine, both versions train alike"
        after = client.chat.completions.create(model=twin.fine_tuned_model, **QUESTION).choices[0].message.content
        assert after == before
        for model in (twin, upgraded):
            assert stack.ft("adapters", "lineage", model.fine_tuned_model, "--verify", key=key).returncode == 0
        assert stack.ft("admin", "audit", "verify").returncode == 0
        ledger = json.loads(stack.ft("admin", "ledger", "check", "--json").stdout)
        assert (ledger["differences"], ledger["total_micros"]) == ([], 0)
        again = until(client, client.fine_tuning.jobs.create(training_file=file.id, suffix="after", **REQUEST).id, ended)
        assert again.status == "succeeded", again.error
