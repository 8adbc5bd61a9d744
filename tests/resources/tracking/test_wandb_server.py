"""Weights & Biases over HTTP, held against its own client: both write to a server that keeps what it is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.platform.protocols import WandbRun
from core.errors import Unavailable
from resources.tracking.wandb_server import HttpWandb
from tests.support.tracking.wandb_server import KEY, WandbServer, wandb_server

RUN = WandbRun(id="ftjob-1", project="support bot", entity="acme", name="first try", tags=("lora", "v1"), config={"seed": 7})
PLACE = ("acme", "support bot", "ftjob-1")
LINES: list[dict[str, Any]] = [{"step": n, "train_loss": 1 / n, "_step": n - 1, "_timestamp": 1000.0 + n, "_runtime": n} for n in (1, 2, 3)]
CLIENT = """
import json, sys, wandb
order = json.load(sys.stdin)
settings = wandb.Settings(
    base_url=order["url"], api_key=order["key"], silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True
)
names = {"project": order["project"], "entity": order["entity"], "id": order["id"], "name": order["name"], "tags": order["tags"]}
run = wandb.init(**names, config=order["config"], settings=settings, dir=order["dir"])
run.define_metric("*", step_metric="step")
for line in order["lines"]:
    run.log({name: value for name, value in line.items() if name[0] != "_"})
run.finish(exit_code=order["exit_code"])
"""


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as running:
        yield running


def append(server: WandbServer, lines: list[dict[str, Any]], *, offset: int, exit_code: int | None = None) -> None:
    sender = HttpWandb(url=server.url)
    sender.append(RUN, lines, entity="acme", offset=offset, summary=lines[-1] if lines else {}, exit_code=exit_code, key=KEY)


def test_a_run_is_stored_as_wandbs_own_client_stores_it(server: WandbServer, tmp_path: Path) -> None:
    order = {
        "url": server.url, "key": KEY, "project": RUN.project, "entity": "acme", "id": "theirs", "name": RUN.name, "tags": list(RUN.tags),
        "config": dict(RUN.config), "lines": LINES, "exit_code": 1, "dir": str(tmp_path),
    }  # fmt: skip
    env = {**os.environ, "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], input=json.dumps(order), capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    theirs = server.runs.get(("acme", "support bot", "theirs"))
    assert theirs is not None, done.stderr
    sender = HttpWandb(url=server.url)
    assert sender.open(RUN, key=KEY) == "acme"
    append(server, LINES, offset=0, exit_code=1)
    ours = server.runs[PLACE]
    assert (ours.name, ours.tags, ours.exit_code) == (theirs.name, theirs.tags, theirs.exit_code) == ("first try", ["lora", "v1"], 1)
    assert ours.config["seed"] == theirs.config["seed"] == {"value": 7}
    assert axes(ours.config) == axes(theirs.config) == {"*": "step"}, "charts are over the optimizer step"
    assert [set(line) for line in ours.history] == [set(line) for line in theirs.history]
    measured = [{k: v for k, v in line.items() if k not in ("_timestamp", "_runtime")} for line in theirs.history]
    assert [{k: v for k, v in line.items() if k not in ("_timestamp", "_runtime")} for line in ours.history] == measured
    assert ours.summary["train_loss"] == theirs.summary["train_loss"] == pytest.approx(1 / 3)


def axes(config: Any) -> dict[str, str]:
    """The step metric of each metric or pattern, as the numbered fields of the client's ``MetricRecord`` say."""
    records = config["_wandb"]["value"]["m"]
    return {one["2"]: records[one["5"] - 1]["1"] for one in records if "5" in one}


def test_lines_that_are_sent_again_are_stored_once(server: WandbServer) -> None:
    HttpWandb(url=server.url).open(RUN, key=KEY)
    append(server, LINES[:2], offset=0)
    append(server, LINES[1:], offset=1)
    append(server, LINES[1:], offset=1)
    append(server, [], offset=3, exit_code=0)
    stored = server.runs[PLACE]
    assert ([line["step"] for line in stored.history], stored.exit_code) == ([1, 2, 3], 0)


def test_a_run_without_an_entity_gets_the_keys_own(server: WandbServer) -> None:
    sender, run = HttpWandb(url=server.url), WandbRun(id="r", project="p", entity=None, name="n", tags=(), config={})
    assert sender.open(run, key=KEY) == "acme"
    assert sender.address(run, entity="acme") == f"{server.url}/acme/p/runs/r"
    assert HttpWandb(url="https://api.wandb.ai").address(RUN, entity="acme") == "https://wandb.ai/acme/support%20bot/runs/ftjob-1"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, "broken"), "answers with status 500"),
        ((429, ""), "answers with status 429"),
        ((403, '{"error": "no access to\x1b[31m acme"}'), "status 403.*no access to"),
        ((302, ""), "answers with status 302"),
        ((200, "<html>a login page</html>"), "answers with status 200: <html>"),
        ((200, '{"errors": [{"message": "project is archived"}]}'), "W&B refuses the run.*project is archived"),
        ((200, '{"data": {"upsertBucket": null}}'), "answers without a run"),
    ],
)
def test_what_is_not_stored_is_reported_with_the_reason(server: WandbServer, answer: tuple[int, str], message: str) -> None:
    server.answers["/graphql"] = answer
    with pytest.raises(Unavailable, match=message) as refused:
        HttpWandb(url=server.url).open(RUN, key=KEY)
    assert refused.value.code == "wandb_unavailable"
    assert KEY not in str(refused.value) and "\x1b" not in str(refused.value)


def test_a_refused_key_and_a_server_that_is_away_are_reported_without_the_key(server: WandbServer) -> None:
    with pytest.raises(Unavailable, match=r"status 401.*invalid API key") as refused:
        HttpWandb(url=server.url).open(RUN, key="another" * 6)
    assert "anotheranother" not in str(refused.value)
    with pytest.raises(Unavailable, match=r"does not answer \(ConnectError\)"):
        HttpWandb(url="http://127.0.0.1:9").open(RUN, key=KEY)
    append_to_nothing = WandbRun(id="deleted", project="p", entity="acme", name="n", tags=(), config={})
    with pytest.raises(Unavailable, match=r"status 400.*no run"):
        HttpWandb(url=server.url).append(append_to_nothing, LINES, entity="acme", offset=0, summary={}, exit_code=None, key=KEY)
