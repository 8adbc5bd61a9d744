"""Nearly valid bodies get an answer in time, never a 5xx; a refusal has a documented code and stores nothing."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.tables import tenants as tenants_table
from core.base_models import Catalogue
from tests.fuzz.damaged_json import damaged
from tests.fuzz.valid_bodies import Family, families
from tests.support.jobs.finished_job import finish
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.background_worker import working
from tests.support.platform.database_roles import as_owner
from tests.support.servers.inference_server import TOKEN, free_port, inference_server
from tools import error_codes

SECONDS = float(os.environ.get("FT_TEST_FUZZ_SECONDS", "60"))
"""Of each family."""
PER_ROUND = 40
MAX_CPU_S, HANGS_AFTER_S = 10.0, 120.0
"""CPU seconds of this process, which the API runs in, and seconds on a machine that may be busy with something else."""
MAX_MESSAGE_CHARS = 2000
ROWS = "Reports: rows"
"""Codes of rows have no status of their own; messages of requests are refused with them."""
ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "examples/demo/base_model"
MODEL = "tiny-base"
WRITTEN_ANYWAY = ("rate_limits", "audit_log", "audit_entries", "procrastinate", "api_keys", "sessions", "alembic")
"""Beginnings of tables that a refused request may change: counters, when a key was last used, who was refused what."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:Generating overly large repr")]
ANSWERED = ("chat", "responses", "completions")
NAMES = ("jobs", "sweeps", "previews", "chat", "responses", "completions", "graders", "uploads", "imports", "webhooks", "account", "routes")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    platform: Platform
    client: httpx.Client
    ids: Mapping[str, str]
    tables: sa.TextClause
    """Selects a digest of all that is stored."""

    def stored(self) -> Any:
        with as_owner(self.platform).connect() as conn:
            return conn.execute(self.tables).scalar_one()


@pytest.fixture(scope="module")
def port() -> int:
    """Where an inference server may run."""
    return free_port()


@pytest.fixture(scope="module")
def inference(port: int) -> Iterator[None]:
    """A real inference server, for families that are answered by one."""
    with inference_server(BASE, port=port, name=MODEL):
        yield


@pytest.fixture(scope="module")
def world(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str], port: int) -> Iterator[World]:
    """A tenant with files, a job and an adapter; a worker runs only until its files are validated."""
    models = Catalogue({MODEL: ({"id": MODEL, "path": str(BASE), "license": "Apache-2.0"}, BASE)})
    options = {
        "inference_urls": f"http://127.0.0.1:{port}",
        "inference_token": TOKEN,
        "webhook_allow": "127.0.0.1/32",
        "hub_endpoint": "http://127.0.0.1:9",
    }
    platform = replace(new_platform(**options), models=models)
    tenant, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:10]}", tier="premium")
    with as_owner(platform).begin() as conn:
        conn.execute(sa.update(tenants_table).values(requests_per_minute=10**8, max_jobs_in_flight=10**6))
    url = serve(create_app(platform))
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key.secret}"}, timeout=600, trust_env=False) as client:
        with working(platform):
            ids = _things(platform, client, tenant.id)
        client.timeout = httpx.Timeout(HANGS_AFTER_S)
        yield World(platform=platform, client=client, ids=ids, tables=_digests(platform))


@pytest.fixture
def of(request: pytest.FixtureRequest, world: World) -> Callable[[str], Family]:
    """Returns a family, and starts what it needs."""

    def family(name: str) -> Family:
        if name in ANSWERED:
            request.getfixturevalue("inference")
        return families(world.ids)[name]

    return family


def _things(platform: Platform, client: httpx.Client, tenant: str) -> Mapping[str, str]:
    def made(path: str, **given: Any) -> str:
        return str(client.post(path, **given).raise_for_status().json()["id"])

    ask, yes, no = ({"role": role, "content": text} for role, text in (("user", "Where?"), ("assistant", "Here."), ("assistant", "There.")))
    pair = {"input": {"messages": [ask]}, "preferred_output": [yes], "non_preferred_output": [no]}
    shapes: Mapping[str, Any] = {
        "chat": {"messages": [ask, yes]}, "other": {"messages": [ask, no]}, "preference": pair,
        "kto": {"prompt": "Where?", "completion": "Here."},
    }  # fmt: skip
    files = {name: _file(client, [_numbered(shape, n) for n in range(60)]) for name, shape in shapes.items()}
    job = made("/v1/fine_tuning/jobs", json={"model": MODEL, "training_file": files["chat"], "seed": 1})
    adapter, served = finish(platform, tenant, job), f"ft:{MODEL}:{tenant}:x:abc"
    add_adapter(platform, tenant, name=served, stage="production", loaded=True)
    hook = made("/v1/webhook_endpoints", json={"name": "a", "url": "http://127.0.0.1:9/hook", "event_types": ["fine_tuning.job.failed"]})
    budget = made("/v1/budgets", json={"name": "a", "limit_micros": 10**6})
    return {
        "model": MODEL, "file": files["chat"], "adapter": adapter, "served": served, "endpoint": hook, "budget": budget,
        **{f"{name}_file": file for name, file in files.items()},
    }  # fmt: skip


def _numbered(shape: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Rows that differ; every other answer without a pair is a good one."""
    row: dict[str, Any] = json.loads(json.dumps(shape).replace("ere", f"ere {number} {chr(97 + number % 26) * (1 + number % 7)}"))
    return row if "completion" not in row else {**row, "label": number % 2 == 0}


def _file(client: httpx.Client, rows: Sequence[Mapping[str, Any]]) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows)
    file = client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("rows.jsonl", content)}).raise_for_status().json()
    assert file["status"] == "processed", file
    return str(file["id"])


def _digests(platform: Platform) -> sa.TextClause:
    names = sa.inspect(as_owner(platform)).get_table_names()
    each = [
        f"SELECT '{name}' AS name, count(*) AS rows, coalesce(sum(hashtext(t::text)), 0) AS digest FROM {name} t"
        for name in names
        if not name.startswith(WRITTEN_ANYWAY)
    ]
    assert len(each) > 30
    return sa.text(f"SELECT jsonb_object_agg(name, jsonb_build_array(rows, digest)) FROM ({' UNION ALL '.join(each)}) s")


@pytest.fixture(scope="session")
def documented() -> Mapping[str, set[str]]:
    """Statuses of each code, as docs/errors.yaml has them."""
    codes = error_codes.load().values()
    found = {code.name: set(code.statuses) | ({"400"} if code.section == ROWS else set()) for code in codes}
    assert len([code for code in codes if code.section == ROWS]) > 10
    assert len(found) > 200
    return found


def check(world: World, family: Family, path: str, body: bytes, documented: Mapping[str, set[str]]) -> int:
    """Send a body; AssertionError if the answer is not one that the documentation has."""
    before, began = world.stored(), time.process_time()
    answer = world.client.request(family.method, path.format(**world.ids), content=body, headers={"content-type": "application/json"})
    assert time.process_time() - began < MAX_CPU_S, (path, body[:2000])
    assert answer.status_code < 500, (path, body[:2000], answer.status_code, answer.text[:500])
    if answer.status_code < 400:
        return answer.status_code
    (kind, error), where = *answer.json().items(), (path, body[:2000], answer.text[:500])  # type: ignore[misc]
    assert kind == "error" and set(error) == {"message", "type", "param", "code"}, where
    assert error["code"] in documented, where
    assert str(answer.status_code) in documented[error["code"]], where
    assert error["message"] and len(error["message"]) <= MAX_MESSAGE_CHARS, where
    after = world.stored()
    assert after == before, (*where, [name for name in after if after[name] != before[name]])
    return answer.status_code


def run(world: World, family: Family, documented: Mapping[str, set[str]], *, seconds: float) -> Counter[int]:
    """Send damaged bodies of a family for so long; answers by status."""
    answers, until = Counter[int](), time.monotonic() + seconds

    for seed in range(10**6):

        @hypothesis.seed(seed)
        @settings(
            max_examples=PER_ROUND, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip
        @given(body=damaged(family.bodies), path=st.sampled_from(family.paths))
        def ask(body: bytes, path: str) -> None:
            answers[check(world, family, path, body, documented)] += 1

        ask()
        if time.monotonic() >= until:
            break
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_the_undamaged_bodies_are_accepted(world: World, of: Callable[[str], Family], name: str) -> None:
    """Else the damage would be done to what is refused anyway."""
    family, refused = of(name), []
    for body in family.bodies:
        answers = [world.client.request(family.method, path.format(**world.ids), json=body) for path in family.paths]
        if not any(answer.is_success for answer in answers):
            refused.append(f"{answers[0].json()['error']['message']}, of {body}")
    assert not refused, "\n".join(refused)


def test_every_family_is_fuzzed(world: World) -> None:
    assert set(NAMES) == set(families(world.ids))


@pytest.mark.parametrize("name", NAMES)
def test_a_few_damaged_bodies_are_answered(
    world: World, of: Callable[[str], Family], name: str, documented: Mapping[str, set[str]]
) -> None:
    assert run(world, of(name), documented, seconds=0).total() >= PER_ROUND


@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_damaged_bodies_are_answered(
    world: World, of: Callable[[str], Family], name: str, documented: Mapping[str, set[str]]
) -> None:
    answers = run(world, of(name), documented, seconds=SECONDS)
    print(json.dumps(answers))  # noqa: T201
    assert answers.total() > 100 and answers[400] > 10
