"""Reference log-probabilities that a training has computed are stored for the tenant's next job, which gets the same bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.api_client import ApiClient
from agent.inputs import NodeInputs
from agent.messages import WriteRequest
from agent.objects import Objects
from agent.uploads.reference_upload import ReferenceUpload
from control_plane.attempts import agents, start
from control_plane.attempts.claims import Claim
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from core.errors import InvalidRequest
from engine.training.reference_logps import ReferenceManifest, verify, write_logps
from tests.support.jobs.followed_jobs import until
from tests.support.jobs.started_job import start_job
from tests.support.jobs.training_specs import SPEC

KEY = "rf_0123456789"


@pytest.fixture
def comparing(platform: Platform, write_chat_rows: Callable[..., Path]) -> Iterator[Claim]:
    """An attempt whose method compares with a reference."""
    claim = start_job(platform, write_chat_rows, spec=replace(SPEC, reference=KEY))
    yield claim
    cycle.release(platform, claim.job_id, claim.attempt)


@pytest.fixture
def calls(platform: Platform, internal_url: str, comparing: Claim) -> Iterator[ApiClient]:
    token = agents.introduce(platform, comparing, may_read=[f"{agents.reference_prefix(comparing)}/"])
    with contextlib.closing(ApiClient(internal_url, token)) as made:
        yield made


def computed(directory: Path) -> ReferenceManifest:
    """A reference of two files, as the training process leaves it."""
    directory.mkdir()
    rows = np.arange(5)
    files = tuple(
        write_logps(directory, f"shard-0000{n}.parquet", {"row": rows, "chosen_logp": rows * -1.0, "rejected_logp": rows * -2.0 - n})
        for n in range(2)
    )
    manifest = ReferenceManifest(
        key=KEY, pack_fingerprint="pk_1", base_digest="d", precision="fp32", attention="sdpa", kind="pairs", quantization=None, files=files
    )
    manifest.write(directory)
    return manifest


def test_the_next_job_gets_what_this_one_computed(platform: Platform, comparing: Claim, calls: ApiClient, tmp_path: Path) -> None:
    prefix = agents.reference_prefix(comparing)
    with contextlib.closing(Objects(calls)) as objects:
        upload = ReferenceUpload(objects, tmp_path / "reference", prefix=prefix, workload=comparing.workload)
        upload.look()
        upload.finish()
        assert not platform.objects.exists(f"{prefix}/manifest.json"), "nothing is there yet"
        manifest = computed(tmp_path / "reference")
        upload.look()
        upload.finish()
        given = start.reference_input(platform.objects, comparing)
        assert given is not None
        inputs = NodeInputs(objects, (given,), cache=tmp_path / "node", tenant=comparing.tenant, target=tmp_path / "inputs-a1")
        staged = verify(inputs.stage(lambda: None)[start.REFERENCE])
    assert [(f.of, f.sha256, f.num_rows) for f in staged.files] == [(f.of, f.sha256, f.num_rows) for f in manifest.files]
    assert {f.name.split("/")[0] for f in staged.files} == {comparing.workload}, "another job's files cannot get in between"


def test_a_stored_one_that_is_damaged_is_computed_again(platform: Platform, comparing: Claim, calls: ApiClient, tmp_path: Path) -> None:
    prefix = agents.reference_prefix(comparing)
    computed(tmp_path / "reference")
    with contextlib.closing(Objects(calls)) as objects:
        upload = ReferenceUpload(objects, tmp_path / "reference", prefix=prefix, workload=comparing.workload)
        upload.look()
        until(lambda: platform.objects.exists(f"{prefix}/manifest.json"))
        upload.finish()
        first = json.loads(platform.objects.get_bytes(f"{prefix}/manifest.json"))["files"][0]["name"]
        platform.objects.put_bytes(f"{prefix}/{first}", b"torn")
        given = start.reference_input(platform.objects, comparing)
        assert given is not None
        inputs = NodeInputs(objects, (given,), cache=tmp_path / "node", tenant=comparing.tenant, target=tmp_path / "inputs-a1")
        assert inputs.stage(lambda: None) == {}, "the run file names none, and the process makes it"


def test_an_attempt_without_a_reference_may_write_none(held: Claim, api: ApiClient) -> None:
    assert agents.reference_prefix(held) == ""
    with pytest.raises(InvalidRequest, match="may not write object"):
        api.write_urls(WriteRequest(key=f"tenants/{held.tenant}/references/{KEY}/manifest.json", part_sha256=("0" * 64,)))
