"""What a tenant's flood does to the tenant beside it: one platform with both, measured alone and together.

with neighbourhood(home) as place:
    found = together(place, "graders", count=50)
"""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import sqlalchemy as sa

from benchmarks.api import history
from benchmarks.local_stack import Stack, local_stack
from benchmarks.soak.processes import Processes
from control_plane.platform.settings import load
from control_plane.tenants.sessions import COOKIE
from core.base_models import Catalogue
from resources.database.engine import make_engine, owner_url
from tests.abuse.flood import flooding
from tests.abuse.scenarios import ASK, ASK_JSON, CHAT, JOB, MODEL, ROWS, SCENARIOS, ok
from tests.abuse.world import World
from tests.support.servers.webhook_receiver import receiver

LOUD, QUIET = "t-0000", "quiet"
NUM_JOBS, EVENTS_PER_JOB, NUM_FILES = 2000, 10, 5000
"""Of the loud tenant, so that its lists are long."""
WARM_S = 3.0
"""From a flood's start to the first measurement: all of its connections are open."""
SERVICES = ("api", "worker", "inference", "supervisor", "postgres server")
IN_FLIGHT = re.compile(r"^ft_api_requests_in_flight (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    stack: Stack
    world: World

    def restarts(self) -> Mapping[str, int]:
        return {s["name"]: int(s["restarts"]) for s in Processes(home=self.stack.home).report()["services"]}

    def in_flight(self) -> int:
        """Requests that the API counts as under way."""
        found = IN_FLIGHT.search(httpx.get(f"{self.world.url}/metrics", timeout=30, trust_env=False).text)
        assert found is not None
        return int(float(found[1]))

    def is_idle(self, *, within_s: float) -> bool:
        """Wait until no request is under way."""
        deadline = time.monotonic() + within_s
        while self.in_flight():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True


@contextmanager
def neighbourhood(home: Path) -> Iterator[Place]:
    """Start a platform on which jobs wait, with a loud tenant that has a history, and a quiet one."""
    with receiver() as webhooks, local_stack(home, {"FT_WEBHOOK_ALLOW": "127.0.0.1/32"}) as stack:
        stack.ft("admin", "maintenance", "start", "--message", "no job is to train here")
        stack.create_tenant(LOUD, tier="premium")
        quiet_key = stack.create_tenant(QUIET, tier="premium")
        _fill(stack)
        loud, quiet = (_belongings(stack.api, key, webhooks.url(path)) for key, path in ((history.secret(0), "/hang"), (quiet_key, "/ok")))
        with httpx.Client(base_url=stack.api, headers=_bearer(quiet_key), timeout=120, trust_env=False) as client:
            answers = [ok(client.post(CHAT, json=body))["choices"][0]["message"]["content"] for body in (ASK, ASK_JSON)]
        world = World(
            url=stack.api, answer=answers[0], answer_json=answers[1],
            **{f"loud_{name}": value for name, value in loud.items()}, **{f"quiet_{name}": value for name, value in quiet.items()},
        )  # fmt: skip
        yield Place(stack=stack, world=world)


def _bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}


def _fill(stack: Stack) -> None:
    settings = load(stack.env)
    engine = make_engine(owner_url(settings))
    digest = Catalogue.load(settings.base_models).get(MODEL).digest
    history.store(engine, num_tenants=1, num_jobs=NUM_JOBS, events_per_job=EVENTS_PER_JOB, model=MODEL, base_digest=digest)
    copied = "jsonb_populate_record(f, jsonb_build_object('id', 'file-f' || lpad(n::text, 23, '0')))"
    with engine.begin() as conn:
        given = {"id": history.file_id(0, 0), "most": NUM_FILES}
        conn.execute(sa.text(f"INSERT INTO files SELECT ({copied}).* FROM files f, generate_series(1, :most) n WHERE f.id = :id"), given)
    engine.dispose()


def _belongings(url: str, key: str, webhook: str) -> Mapping[str, str]:
    """Give a tenant one of everything."""
    with httpx.Client(base_url=url, headers=_bearer(key), timeout=120, trust_env=False) as client:
        file = ok(client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("mine.jsonl", ROWS.encode())}))
        assert file["status"] == "processed", file
        job = ok(client.post("/v1/fine_tuning/jobs", json={**JOB, "training_file": file["id"], "metadata": {"team": "mine"}}))
        endpoint = ok(
            client.post("/v1/webhook_endpoints", json={"name": "mine", "url": webhook, "event_types": ["fine_tuning.job.failed"]})
        )
        signed_in = client.post("/console/sign-in", data={"key": key}, headers={"authorization": ""})
        session = signed_in.cookies[COOKIE]
    return {"key": key, "file": file["id"], "job": job["id"], "endpoint": endpoint["id"], "session": session}


def measured(name: str, world: World, *, count: int) -> list[float]:
    """Do the quiet tenant's work so often; return the seconds that each took, sorted."""
    found = []
    with httpx.Client(base_url=world.url, headers=_bearer(world.quiet_key), timeout=60, trust_env=False) as client:
        for _ in range(count):
            began = time.perf_counter()
            SCENARIOS[name].work(client, world)
            found.append(time.perf_counter() - began)
            time.sleep(0.05)
    return sorted(found)


def together(place: Place, name: str, *, count: int) -> dict[str, Any]:
    """Measure a scenario's work alone and beside its flood; AssertionError if an answer to the quiet tenant is wrong."""
    measured(name, place.world, count=2)
    alone, before = measured(name, place.world, count=count), place.restarts()
    with flooding(name, place.world) as flood, _watched_memory(place) as peaks_mib:
        time.sleep(WARM_S)
        beside = measured(name, place.world, count=count)
    return {
        "alone": _figures(alone), "beside": _figures(beside), "flood": flood.report, "peak_mib": peaks_mib,
        "restarted": [service for service, number in place.restarts().items() if number != before[service]],
        "idle_after": place.is_idle(within_s=60), "loud_works_again": _works_again(place.world),
    }  # fmt: skip


def _figures(seconds: list[float]) -> Mapping[str, float]:
    ms = [round(1000 * each, 1) for each in seconds]
    return {"p50_ms": round(statistics.median(ms), 1), "p99_ms": ms[min(len(ms) - 1, int(0.99 * len(ms)))], "max_ms": ms[-1]}


def _works_again(world: World, *, within_s: float = 60) -> bool:
    """Whether the tenant of the flood gets right answers once it has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(AssertionError, httpx.HTTPError):
            measured("long streams", replace(world, quiet_key=world.loud_key), count=1)
            return True
        time.sleep(0.5)
    return False


@contextmanager
def _watched_memory(place: Place) -> Iterator[dict[str, int]]:
    """Collect the largest resident memory of each service while the block runs."""
    peaks, ends = dict.fromkeys(SERVICES, 0), threading.Event()
    watched = {name: psutil.Process(pid) for name, pid in Processes(home=place.stack.home).services().items() if name in SERVICES}

    def watch() -> None:
        while not ends.wait(0.5):
            for name, process in watched.items():
                with contextlib.suppress(psutil.Error):
                    peaks[name] = max(peaks[name], process.memory_info().rss >> 20)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        ends.set()
        thread.join()
