"""What the doctor finds in the services that every installation has, and what its command prints."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.platform.settings import Settings, load
from deploy.doctor.check_findings import LIMIT_S, Finding, Site, run
from deploy.doctor.service_checks import CHECKS, version
from resources.database import embedded, migrate
from tests.deploy.local.test_stack_services import dagster_answer
from tests.support.platform.database_roles import as_owner
from tests.support.servers.checked_s3 import Application, checked, checked_s3, served_s3

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
NOWHERE = "http://127.0.0.1:9"
TOKEN = "a-token-of-dagster"


class Dagster:
    """Dagster's webserver, as far as its state is asked for."""

    def __init__(self) -> None:
        self.state: Any = dagster_answer()

    def app(self) -> ASGIApp:
        return Starlette(routes=[Route("/graphql", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return Response(status_code=401)
        assert "daemonHealth" in (await request.json())["query"]
        return JSONResponse({"data": self.state})


class Inference:
    """A server with vLLM's listing; without `loads`, it was started without the endpoints for adapters."""

    def __init__(self, *, loads: bool = True, digest: str = "ab" * 32) -> None:
        self.loads, self.digest = loads, digest

    def app(self) -> ASGIApp:
        load = [Route("/v1/load_lora_adapter", lambda _: Response(), methods=["POST"])] if self.loads else []
        return Starlette(routes=[Route("/v1/models", self._models), *load])

    async def _models(self, _request: Request) -> Response:
        names = ["llama", *([f"llama@sha256:{self.digest}"] if self.digest else [])]
        return JSONResponse({"data": [{"id": name, "root": "/models/llama", "parent": None} for name in names]})


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Makes a bucket on a store that refuses what S3 refuses, unless it is served otherwise; returns its URL."""
    import boto3

    with ExitStack() as running:

        def make(store: AbstractContextManager[tuple[str, int]] | None = None) -> str:
            host, port = running.enter_context(store or checked_s3())
            for name, value in {**AWS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
                monkeypatch.setenv(name, value)
            name = f"objects-{port}"  # equal settings give the same store
            boto3.client("s3").create_bucket(Bucket=name)
            return f"s3://{name}/deep"

        yield make


def examine(settings: Settings, *only: str, ahead_s: float = 0.0, limit_s: float = 60.0) -> dict[str, list[Finding]]:
    checks = {name: CHECKS[name] for name in only or CHECKS}
    return run(checks, Site(settings=settings, clock=lambda: time.time() + ahead_s), limit_s=limit_s)


def bad(settings: Settings, check: str, *, ahead_s: float = 0.0) -> list[Finding]:
    return [each for each in examine(settings, check, ahead_s=ahead_s)[check] if each.status != "ok"]


def test_a_healthy_installation_gives_only_ok(
    platform: Platform, serve: Callable[[ASGIApp], str], bucket: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_DAGSTER_URL", serve(Dagster().app()))
    settings = replace(
        platform.settings, internal_url=serve(create_app(platform)), object_store=bucket(), dagster_token=TOKEN,
        inference_urls=(serve(Inference().app()), serve(Inference().app())),
    )  # fmt: skip
    found = examine(settings)
    assert {name: len(each) for name, each in found.items()} == {"database": 4, "object store": 3, "API": 1, "Dagster": 3, "serving": 2}
    assert {each.status for findings in found.values() for each in findings} == {"ok"}, found


def test_a_database_that_is_down_is_a_problem_and_the_password_is_not_shown(platform: Platform) -> None:
    (found,) = bad(replace(platform.settings, database_url="postgresql://ft:hunter2@127.0.0.1:9/ft"), "database")
    assert (found.status, "refused" in found.found, "psql" in found.fix) == ("problem", True, True)
    assert "hunter2" not in found.found + found.fix


def test_a_schema_of_another_version_is_a_problem(fresh_platform: Platform, postgres_dir: Path) -> None:
    with as_owner(fresh_platform).begin() as conn:
        conn.execute(sa.text("UPDATE alembic_version SET version_num = 'older'"))
    (found,) = bad(fresh_platform.settings, "database")
    assert (found.status, found.found) == ("problem", f"schema at revision older, this version needs {migrate.head()}")
    assert found.fix == "ft down && ft up"
    empty = replace(fresh_platform.settings, database_url=embedded.socket_url(postgres_dir, "postgres"))
    assert [each.found.partition(",")[0] for each in bad(empty, "database")] == [
        "schema at revision None",
        "no table has row-level security",
    ]


def test_a_login_that_bypasses_row_security_is_a_problem(platform: Platform) -> None:
    owner = as_owner(platform)
    with owner.begin() as conn:
        conn.execute(sa.text("ALTER ROLE ft_tenant BYPASSRLS"))
    try:
        (found,) = bad(platform.settings, "database")
    finally:
        with owner.begin() as conn:
            conn.execute(sa.text("ALTER ROLE ft_tenant NOBYPASSRLS"))
    assert (found.status, found.fix) == ("problem", "ALTER ROLE ft_tenant NOSUPERUSER NOBYPASSRLS;")


def test_an_old_server_is_a_problem() -> None:
    assert (version(140_012).status, version(140_012).found) == ("problem", "PostgreSQL 14.12 (15 or later)")
    assert version(150_000).status == "ok"


@pytest.mark.parametrize(("ahead_s", "status"), [(5.0, "warning"), (-5.0, "warning"), (60.0, "problem"), (-60.0, "problem")])
def test_a_clock_that_is_wrong_is_found_against_the_database_and_the_object_store(
    platform: Platform, bucket: Callable[..., str], ahead_s: float, status: str
) -> None:
    settings = replace(platform.settings, object_store=bucket())
    for check in ("database", "object store"):
        (found,) = bad(settings, check, ahead_s=ahead_s)
        assert found.status == status
        assert ("ahead of" if ahead_s > 0 else "behind") in found.found
        assert "timedatectl" in found.fix


def unconditional(application: Application) -> Application:
    """A store that does not know If-None-Match."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return application({k: v for k, v in environ.items() if k != "HTTP_IF_NONE_MATCH"}, start_response)

    return answer


def test_a_store_that_does_less_than_s3_is_found(platform: Platform, bucket: Callable[..., str]) -> None:
    (found,) = bad(replace(platform.settings, object_store=bucket(served_s3(lambda moto: unconditional(checked(moto))))), "object store")
    assert (found.status, "answered with 200, 200, not 200, 412" in found.found) == ("warning", True)
    (found,) = bad(replace(platform.settings, object_store=bucket(served_s3(lambda moto: moto))), "object store")
    assert (found.status, "x-amz-checksum-sha256" in found.found) == ("problem", True)
    (found,) = bad(replace(platform.settings, object_store=bucket(served_s3(checked, ahead_s=-60.0))), "object store")
    assert (found.status, "ahead of that of the object store" in found.found) == ("problem", True)


def test_a_bucket_that_is_missing_is_a_problem_and_a_directory_has_no_clock(platform: Platform, bucket: Callable[..., str]) -> None:
    bucket()
    (found,) = bad(replace(platform.settings, object_store="s3://other"), "object store")
    assert (found.status, "NoSuchBucket" in found.found) == ("problem", True)
    ok, skipped = examine(platform.settings, "object store")["object store"]
    assert (ok.status, skipped.status) == ("ok", "skipped")


def test_nothing_is_left_in_the_store(platform: Platform, bucket: Callable[..., str]) -> None:
    import boto3

    url = bucket()
    assert bad(replace(platform.settings, object_store=url), "object store") == []
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=url.split("/")[2])


def test_services_that_are_down_are_problems(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DAGSTER_URL", NOWHERE)
    settings = replace(platform.settings, internal_url=NOWHERE, inference_urls=(NOWHERE,))
    for check in ("API", "Dagster", "serving"):
        (found,) = bad(settings, check)
        assert (found.status, NOWHERE in found.found, bool(found.fix)) == ("problem", True, True)
    (found,) = bad(replace(settings, inference_urls=("",)), "serving")
    assert found.status == "skipped"


def test_an_api_that_is_not_ready_is_a_problem(fresh_platform: Platform, serve: Callable[[ASGIApp], str]) -> None:
    with as_owner(fresh_platform).begin() as conn:
        conn.execute(sa.text("UPDATE alembic_version SET version_num = 'older'"))
    (found,) = bad(replace(fresh_platform.settings, internal_url=serve(create_app(fresh_platform))), "API")
    assert (found.status, "answers 503" in found.found) == ("problem", True)


def test_dagster_says_what_is_wrong(platform: Platform, serve: Callable[[ASGIApp], str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Dagster()
    monkeypatch.setenv("FT_DAGSTER_URL", serve(server.app()))
    settings = replace(platform.settings, dagster_token=TOKEN)
    server.state = dagster_answer(error="No module named 'x'")
    (found,) = bad(settings, "Dagster")
    assert (found.status, "No module named 'x'" in found.found) == ("problem", True)
    server.state = dagster_answer(healthy=False)
    (found,) = bad(settings, "Dagster")
    assert (found.status, found.found) == ("problem", "daemons starting (0/1)")
    (found,) = bad(replace(settings, dagster_token="another"), "Dagster")
    assert (found.status, "401" in found.found, "FT_DAGSTER_TOKEN" in found.fix) == ("problem", True, True)
    monkeypatch.setenv("FT_EXECUTOR", "k8s")
    (found,) = bad(replace(settings, dagster_token=""), "Dagster")
    assert (found.status, "helm test ft-platform" in found.found) == ("skipped", True)


def test_an_inference_server_that_takes_no_adapters_or_hides_its_base_is_found(platform: Platform, serve: Callable[[ASGIApp], str]) -> None:
    urls = (serve(Inference(loads=False).app()), serve(Inference(digest="").app()), serve(Inference().app()))
    deaf, nameless = bad(replace(platform.settings, inference_urls=urls), "serving")
    assert (deaf.status, urls[0] in deaf.found, "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in deaf.fix) == ("problem", True, True)
    assert (nameless.status, urls[1] in nameless.found, "llama@sha256:" in nameless.fix) == ("warning", True, True)


def test_a_check_that_hangs_or_breaks_stops_no_other(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DAGSTER_URL", "not a URL")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = replace(platform.settings, internal_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = examine(settings, "API", "Dagster", "database", limit_s=4.0)
        assert time.monotonic() - began < LIMIT_S
    assert [each.found for each in found["API"]] == ["no answer within 4 s"]
    assert [(each.status, "unknown url type" in each.found) for each in found["Dagster"]] == [("problem", True)]
    assert {each.status for each in found["database"]} == {"ok"}


def test_a_broken_pools_file_is_reported_and_the_database_is_checked_all_the_same(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text("pools: []")
    settings = replace(platform.settings, pools_file=tmp_path / "pools.yaml")
    assert [each.status for each in bad(settings, "object store")] == ["problem"]
    assert bad(settings, "database") == []


def test_the_command_prints_a_line_for_each_finding_with_its_fix(
    offline: Callable[..., Any], platform: Platform, serve: Callable[[ASGIApp], str]
) -> None:
    env = {
        "FT_HOME": str(platform.settings.home), "FT_DATABASE_URL": platform.settings.database_url, "FT_INFERENCE_URLS": ",",
        "FT_INTERNAL_URL": serve(create_app(platform)), "FT_DAGSTER_URL": NOWHERE,
    }  # fmt: skip
    done = offline("admin", "doctor", **env)
    assert (done.code, done.err) == (1, "1 problem, 0 warnings\n")
    lines = done.out.splitlines()
    (wrong,) = (line for line in lines if line.startswith("problem "))
    assert wrong.startswith(f"problem  Dagster: {NOWHERE} does not answer") and wrong.endswith("Fix: ft status || ft up")
    assert {line.split()[0] for line in lines} == {"ok", "problem", "skipped"}
    found = offline("admin", "doctor", "--json", **env).json
    assert [f"{each['status']:<8} {each['check']}: {each['found']}" for each in found["findings"]] == [
        line.partition(". Fix: ")[0] for line in lines
    ]
    assert (found["problems"], found["warnings"]) == (1, 0)
    serving = {"FT_DAGSTER_URL": serve(Dagster().app()), "FT_DAGSTER_TOKEN": TOKEN}
    assert offline("admin", "doctor", **env | serving).code == 0


def test_a_home_that_does_not_exist_is_a_problem_and_stays_away(offline: Callable[..., Any], tmp_path: Path) -> None:
    done = offline("admin", "doctor", "--json", FT_HOME=str(tmp_path / "none"))
    assert (done.code, [(each["check"], each["status"]) for each in json.loads(done.out)["findings"]]) == (1, [("home", "problem")])
    assert not (tmp_path / "none").exists()
    assert load({"FT_HOME": str(tmp_path / "none")}).embedded_database
