"""An attempt's token grants URLs of its own objects: no key of another tenant, job or attempt, however it is spelled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agent.api_client import ApiClient
from agent.messages import Completion, WriteRequest
from control_plane.attempts import agents
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from core import layout
from core.errors import FtError, InvalidRequest
from tests.support.jobs.started_job import start_job

DIGEST = "0" * 64
REFUSED = ("not_its_object", "invalid_object_key")


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(local_gpus="8")


@pytest.fixture(scope="module")
def theirs(platform: Platform) -> str:
    """An object of another tenant's job."""
    key = f"{layout.checkpoint_prefix('beta', 'ftjob-0', 1, 1)}/x"
    platform.objects.put_bytes(key, b"of another tenant")
    return key


SPELLINGS: dict[str, Callable[[str, str], str]] = {
    # of the job's own prefix and a foreign key
    "as it is": lambda own, key: key,
    "by ..": lambda own, key: f"{own}/../../../../{key}",
    "by encoded ..": lambda own, key: f"{own}/%2e%2e/%2e%2e/%2e%2e/%2e%2e/{key}",
    "by .. of another alphabet": lambda own, key: f"{own}/\uff0e\uff0e/\uff0e\uff0e/{key}",
    "by \\..": lambda own, key: f"{own}\\..\\..\\..\\..\\{key}",
    "from the root": lambda own, key: f"/{key}",
    "with a slash more": lambda own, key: key.replace("/", "//", 1),
    "with a dot": lambda own, key: f"./{key}",
    "after a NUL": lambda own, key: f"{own}/\0/../../../../{key}",
    "after a line break": lambda own, key: f"{own}\n{key}",
    "of a job whose name begins alike": lambda own, key: f"{own}x/checkpoints/a1/step-00000001/x",
    "of the tenants' keys": lambda own, key: f"{own}/../../../../.keys/{key.split('/')[1]}",
    "of the machine": lambda own, key: "file:///etc/passwd",
    "much too long": lambda own, key: f"{own}/checkpoints/a1/{'x' * 300}",
    "longer than a path may be": lambda own, key: f"{own}/checkpoints/a1/{'x/' * 4000}x",
}


def granted(api: ApiClient, key: str) -> dict[str, str]:
    """URLs that read the object; none if it is refused, by one of the codes for that, or not there."""
    try:
        return dict(api.read_urls((key,)).urls)
    except FtError as error:
        if error.code not in REFUSED:
            raise
        return {}


def test_no_url_reads_or_writes_what_is_anothers(api: ApiClient, held: Claim, theirs: str, platform: Platform) -> None:
    own = layout.job_prefix(held.tenant, held.job_id)
    for spelling, spelled in SPELLINGS.items():
        key = spelled(own, theirs)
        assert granted(api, key) == {}, spelling
        with pytest.raises(FtError) as refused:
            api.write_urls(WriteRequest(key=key, part_sha256=(DIGEST,)))
        assert refused.value.code in REFUSED, (spelling, refused.value)
        with contextlib.suppress(FtError):  # a local store has nothing to complete
            api.complete(Completion(key=key, upload_id="u", etags=("e",), part_sha256=(DIGEST,)))
        assert [info.key for info in platform.objects.list("tenants/beta")] == [theirs]


def test_another_attempt_and_what_the_control_plane_writes_are_not_the_attempts_to_write(api: ApiClient, held: Claim) -> None:
    own = layout.job_prefix(held.tenant, held.job_id)
    assert api.write_urls(WriteRequest(key=f"{attempts.checkpoint_prefix(held)}/step-00000001/x", part_sha256=(DIGEST,))).parts
    for place in (
        f"{own}/checkpoints/a{held.attempt + 1}/step-00000001/x", f"{own}/final/a{held.attempt + 1}/x", f"{own}/evals/report.json",
        f"{own}/attempts/a{held.attempt}/train.log", f"tenants/{held.tenant}/adapters/a/adapter_model.safetensors",
        f"tenants/{held.tenant}/files/f/rows.jsonl", f"{own}/checkpoints/a{held.attempt}", "base_models/d/model.safetensors",
    ):  # fmt: skip
        with pytest.raises(FtError) as refused:
            api.write_urls(WriteRequest(key=place, part_sha256=(DIGEST,)))
        assert refused.value.code == "not_its_object", place


def test_digests_that_are_none_are_refused(api: ApiClient, held: Claim) -> None:
    for digests in [("",), ("zz" * 32,), ("00" * 31,), (), (DIGEST, "00"), ("../",), (DIGEST,) * 10_001]:
        with pytest.raises(InvalidRequest) as refused:
            api.write_urls(WriteRequest(key=f"{attempts.checkpoint_prefix(held)}/step-00000001/x", part_sha256=digests))
        assert "part" in refused.value.message, digests[:2]


def test_a_token_says_nothing_once_its_attempt_was_released(
    platform: Platform, internal_url: str, write_chat_rows: Callable[..., Path]
) -> None:
    claim = start_job(platform, write_chat_rows)
    token = agents.introduce(platform, claim, may_read=["base_models/"])
    key = f"{attempts.checkpoint_prefix(claim)}/step-00000001/x"
    body = {"keys": [key]}
    url = f"{internal_url}/internal/attempt/objects/read"
    assert httpx.post(url, json=body, headers={"authorization": f"Bearer {token}"}).status_code == 200
    cycle.release(platform, claim.job_id, claim.attempt)
    assert httpx.post(url, json=body, headers={"authorization": f"Bearer {token}"}).json()["error"]["code"] == "attempt_released"
    for wrong in ("x", token[:-1], token + "x", f"{token} {token}", token.swapcase()):
        answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {wrong}"})
        assert answer.status_code in (401, 409), wrong
