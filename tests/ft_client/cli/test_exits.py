"""Exit codes of failures: 4 says that nothing answered at all, 1 that what answered could not serve."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from ft_client.cli.output import Exit, exit_code
from tests.ft_client.cli.conftest import Ft
from tools import error_codes

NOTHING_ANSWERS = {"unreachable", "stack_down", "database_unreachable"}
DOCUMENTED = {code: entry.statuses for code, entry in error_codes.load().items()}


def test_nothing_that_answers_with_503_is_called_unreachable() -> None:
    served = sorted(code for code, statuses in DOCUMENTED.items() if statuses == {"503"})
    assert len(served) > 15 and {"unavailable", "database_unavailable", "inference_unavailable", "schema_outdated"} <= set(served)
    assert {code: exit_code(Unavailable("x", code=code)) for code in served} == dict.fromkeys(served, Exit.FAILED)


@pytest.mark.parametrize("code", sorted(NOTHING_ANSWERS))
def test_what_does_not_answer_at_all_is_unreachable(code: str) -> None:
    assert DOCUMENTED[code] == set(), "no answer has a status"
    assert exit_code(Unavailable("x", code=code)) == Exit.UNREACHABLE == 4


def test_every_other_failure_is_an_ordinary_one() -> None:
    errors = [Unavailable("x"), Conflict("x", code="stack"), InvalidRequest("x"), NotFound("x"), Unavailable("x", code="supervisor_died")]
    assert {exit_code(error) for error in errors} == {Exit.FAILED}


def test_a_command_of_an_operator_tells_a_platform_that_is_down_from_a_database_that_is_away(offline: Ft) -> None:
    down = offline("admin", "tenants", "list", "--json")
    assert (down.code, down.json["error"]["code"]) == (4, "stack_down")
    away = offline("admin", "tenants", "list", "--json", FT_DATABASE_URL="postgresql://ft:x@127.0.0.1:9/ft")
    assert (away.code, away.json["error"]["code"]) == (4, "database_unreachable")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tenants", "create", "BAD"), "tenant id 'BAD' is not valid"),
        (("tenants", "update", "acme", "--max-jobs", "many"), "max_jobs_in_flight 'many' is neither a number"),
        (("adjust", "acme", "--usd", "ten", "--reason", "r"), "'ten' is not an amount in dollars"),
        (("operators", "create", "ops", "--expires-in", "soon"), "'soon' is not a duration"),
        (("usage", "--by", "week"), "bucket_width 'week' is unknown"),
        (("audit", "--since", "noon"), "'noon' is not a time"),
        (("models", "remove", "nope"), "base model 'nope' is not in the catalogue"),
        (("kueue", "--check", "nope.yaml"), "--check nope.yaml is not a file"),
    ],
)
def test_wrong_arguments_of_an_operator_are_reported_even_if_the_database_is_down(
    offline: Ft, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "home").mkdir()
    assert offline("admin", "tenants", "list", "--json").json["error"]["code"] == "stack_down"
    refused = offline("admin", *arguments)
    assert message in refused.err and refused.code in (1, 2), refused


def test_a_command_that_would_work_on_other_objects_than_the_running_stack_is_refused(offline: Ft, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/endpoints.json").write_text(json.dumps({"FT_OBJECT_STORE": f"file://{tmp_path}/data", "FT_COLD_DIR": "/cold"}))
    refused = offline("admin", "keys", "retire")
    assert refused.code == 1 and "[settings_differ]" in refused.err
    assert f"runs with FT_OBJECT_STORE=file://{tmp_path}/data, and this command with FT_OBJECT_STORE=file://{tmp_path}/home" in refused.err
    same_store = offline("admin", "keys", "retire", FT_OBJECT_STORE=f"file://{tmp_path}/data")
    assert "runs with FT_COLD_DIR=/cold, and this command with FT_COLD_DIR=;" in same_store.err
    both = {"FT_OBJECT_STORE": f"file://{tmp_path}/data", "FT_COLD_DIR": "/cold"}
    assert offline("admin", "tenants", "list", "--json", **both).json["error"]["code"] == "stack_down"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_root_writes_nothing_to_the_home_of_another_user(offline: Ft, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 65534, 65534)
    assert offline("admin", "keys", "rotate", "--json").json["error"]["code"] == "home_not_private"
    assert not list((tmp_path / "home").iterdir())


def test_a_command_of_an_operator_writes_nothing_to_a_home_that_does_not_exist(offline: Ft, tmp_path: Path) -> None:
    offline("admin", "nodes", "list")
    assert not (tmp_path / "home").exists()


@pytest.fixture
def without_database() -> Iterator[str]:
    """An API whose database is away; clients need not ask again."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"error": {"message": "the database did not answer", "type": "server_error", "code": "database_unavailable"}}'
            self.send_response(503)
            self.send_header("x-should-retry", "false")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_api_that_answers_503_is_an_ordinary_failure(offline: Ft, without_database: str) -> None:
    done = offline("--url", without_database, "--api-key", "x", "jobs", "--json")
    assert (done.code, done.json["error"]["code"]) == (1, "database_unavailable")
