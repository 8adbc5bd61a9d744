"""One line at the start of an outage and one at its end; a real server that is not there, and real loggers."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import psycopg2
import pytest

from core.telemetry import logs, outages
from tests.support.servers.inference_server import free_port

LOOPS = """
import logging, sys, time
from core.telemetry import logs; from core.telemetry import outages
outages.OVER_S = 1.5
if sys.argv[1] == "dagster":
    logging.setLoggerClass(outages.Logger)
    logging.basicConfig(format="%(name)s: %(message)s")
else:
    logs.configure("test")
    logging.getLogger().addHandler(logs.handler("another handler"))
import psycopg2
def connect():
    try:
        psycopg2.connect(host="/nowhere", dbname="x", user="y")
    except psycopg2.OperationalError:
        raise RuntimeError("not connected")
for turn in range(5):
    for name in ("a", "b"):
        try:
            connect()
        except RuntimeError:
            logging.getLogger(name).exception("turn %d has failed", turn)
    time.sleep(0.3)
try:
    raise KeyError("a mistake")
except KeyError:
    logging.getLogger("a").exception("another error")
time.sleep(2.5)
"""


@pytest.mark.parametrize(("whose", "handlers"), [("ours", 2), pytest.param("dagster", 1, marks=pytest.mark.slow)])
def test_an_outage_is_two_lines_however_many_loops_meet_it_and_however_long_it_lasts(whose: str, handlers: int) -> None:
    done = subprocess.run([sys.executable, "-c", LOOPS, whose], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    began = "the database at /nowhere/.s.PGSQL.5432 does not answer: turn 0 has failed (RuntimeError: not connected)"
    assert sum(began in line for line in lines) == sum("does not answer" in line for line in lines) == handlers
    assert sum("9 errors were not logged" in line for line in lines) == handlers
    assert done.stderr.count("Traceback") == handlers, "the other error's, which is no outage"
    assert "KeyError: 'a mistake'" in done.stderr


PEERS = """
import logging, sys, time, urllib.request
import httpx, psycopg2
from core.telemetry import logs; from core.telemetry import outages
outages.OVER_S = 1.0
logs.configure("test")
ports = sys.argv[1:]
def meets(call, turn):
    try:
        call()
    except Exception:
        logging.getLogger("a").exception("turn %d has failed", turn)
def dropped():
    raise psycopg2.OperationalError("server closed the connection unexpectedly")
for turn in range(3):
    for port in ports:
        meets(lambda: httpx.get(f"http://127.0.0.1:{port}/v1/{turn}"), turn)
    meets(dropped, turn)
    for port in ports:
        meets(lambda: psycopg2.connect(host="127.0.0.1", port=int(port), dbname="x", user="y"), turn)
time.sleep(2)
"""


def test_each_peer_that_is_away_has_a_line_that_names_it() -> None:
    ports = [str(free_port()), str(free_port())]
    done = subprocess.run([sys.executable, "-c", PEERS, *ports], capture_output=True, text=True, timeout=60, check=True)
    lines = [line.partition(" a: ")[2] or line.partition("core.telemetry.outages: ")[2] for line in done.stderr.splitlines()]
    began = [line.partition(" does not answer: ")[0] for line in lines if "does not answer: turn 0 has failed" in line]
    # the first database that is named takes over the outage that an error without a name began
    assert sorted(began) == sorted([*(f"127.0.0.1:{port}" for port in ports), "the database", f"the database at 127.0.0.1:{ports[1]}"])
    ended = {line.partition(": no further")[0]: line for line in lines if "no further error" in line}
    expected = {
        f"127.0.0.1:{ports[0]}": 2,
        f"127.0.0.1:{ports[1]}": 2,
        f"the database at 127.0.0.1:{ports[0]}": 3,
        f"the database at 127.0.0.1:{ports[1]}": 4,
    }
    assert ended.keys() == expected.keys()
    assert all(f"{count} errors were not logged" in ended[name] for name, count in expected.items())
    assert "Traceback" not in done.stderr


def test_an_error_that_a_running_database_reports_is_logged_in_full(postgres_dir: Path) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(outages.OneLinePerOutage())
    logger = logging.getLogger("test_outages")
    logger.addHandler(handler)
    connection = psycopg2.connect(dbname="postgres", user="postgres", host=str(postgres_dir))
    try:
        connection.cursor().execute("SET statement_timeout = 1; SELECT pg_sleep(5)")
    except psycopg2.OperationalError:
        logger.exception("a query was too slow")
    finally:
        connection.close()
        logger.removeHandler(handler)
    assert "Traceback" in out.getvalue()
    assert "statement timeout" in out.getvalue()


def test_every_handler_of_ours_has_the_filter() -> None:
    assert any(isinstance(f, outages.OneLinePerOutage) for f in logs.handler("test").filters)


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    error = psycopg2.OperationalError("connection to server failed: Connection refused")
    error.__cause__ = error
    record = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), (type(error), error, None))
    assert outages.peer_away(record) is not None
