"""The whole way on one machine: tickets in, an answer from the adapter out, through the API like any tenant.

    python -m examples.demo.run        (``make demo``)

Starts the embedded stack if it is not up and leaves it running. Writes ``<home>/demo-result.json``. Exit code 1 when the
adapter did not make it into production, with the reason and where the logs are.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from control_plane.composition import open_platform
from control_plane.platform.settings import Settings
from control_plane.tenants import service as tenants
from core.errors import FtError, Unavailable
from core.storable_text import shown_answer
from deploy.local import lifecycle
from deploy.local.stack_view import StackView
from deploy.local.supervisor.stack_report import Phase
from ft_client import FtClient
from ft_client.cli.job_progress import follow
from ft_client.cli.output import percent, show_error
from ft_client.cli.session import Credentials, connect
from ft_client.demo import tickets
from resources.atomic_write import write_atomically

MODEL = "demo-llama-3m"
SUFFIX = "tickets"
ASKED = 60
"""Holdout tickets of each kind (seen and unseen phrasing) that are asked through the gateway: one is 1.7 points."""
AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Shares of answers that are equal to the record, by the ticket's kind of phrasing."""

    seen: float
    unseen: float


def main() -> int:
    began = time.monotonic()
    settings = lifecycle.load_settings()
    try:
        _ensure_up(settings)
        credentials = _credentials(settings)
        with connect(credentials) as client:
            return _demonstrate(client, settings, began=began)
    except FtError as e:
        show_error(e, as_json=False)
        _say(f"logs: {settings.log_dir}; state: `ft status`; end everything: `ft down`")
        return 1
    except KeyboardInterrupt:
        _say("\nstopped watching; the stack runs on: `ft status`, `ft jobs`, `ft down`")
        return 130


def _say(text: str = "") -> None:
    print(text, flush=True)


def _headline(text: str) -> None:
    _say(f"\n== {text}")


def _ensure_up(settings: Settings) -> None:
    if lifecycle.status(settings).phase is Phase.READY:
        _say("the stack is up already")
        return
    _headline("starting PostgreSQL, Dagster, the API and the inference server")
    with StackView() as view:
        final = lifecycle.up_detached(settings, view)
    if final.phase is not Phase.READY:
        raise Unavailable(f"the stack did not start: {final.error or final.message or final.phase}", code="stack_down")


def _credentials(settings: Settings) -> Credentials:
    """The demo tenant's key: of an earlier run, if this database knows it; else of a new tenant."""
    url = str(json.loads(settings.endpoints_file.read_text())["api"])
    path = settings.home / "demo-tenant.json"
    platform = open_platform(settings)
    if path.exists():
        known = json.loads(path.read_text())
        try:
            tenants.authenticate(platform, known["api_key"])
            return Credentials(url=url, api_key=known["api_key"])
        except FtError:
            path.unlink()
    tenant, key = tenants.create(platform, f"demo-{uuid.uuid4().hex[:6]}", tier="standard")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        json.dump({"tenant": tenant.id, "api_key": key.secret}, f)
    _say(f"made tenant {tenant.id} (tier {tenant.tier})")
    return Credentials(url=url, api_key=key.secret)


def _demonstrate(client: FtClient, settings: Settings, *, began: float) -> int:
    data = settings.home / "demo"
    _headline("tickets")
    data.mkdir(parents=True, exist_ok=True)
    for name, text in tickets.files().items():
        (data / name).write_text(text, encoding="utf-8")
    rows = [json.loads(line) for line in (data / tickets.HOLDOUT).read_text().splitlines()]
    train, holdout = (client.files.create(data / name) for name in (tickets.TICKETS, tickets.HOLDOUT))
    for file in (train, holdout):
        _say(f"uploaded {file['filename']}: {file['id']} {file['status']} {file.get('status_details') or ''}".rstrip())

    _headline(f"fine-tuning {MODEL}")
    submitted_at = time.time()
    job = client.jobs.create(model=MODEL, training_file=train["id"], validation_file=holdout["id"], suffix=SUFFIX)
    _say(f"job {job['id']}")
    final = follow(client, job["id"])
    if final["status"] != "succeeded":
        return _explain_failure(client, final, settings)
    promoted_s = time.time() - submitted_at
    adapter = client.adapters.retrieve(final["adapter_id"])

    _headline("the same ticket, asked of base and adapter through the API")
    _show_pair(client, rows, adapter["name"])
    answers = _ask_holdout(client, rows, adapter["name"])
    metrics: Mapping[str, float] = adapter["metrics"]
    result = {
        "base_exact_match": metrics["base/holdout/exact_match"],
        "adapter_exact_match": metrics["holdout/exact_match"],
        "submit_to_first_step_s": round(client.jobs.metrics(job["id"])["data"][0]["time"] - submitted_at, 1),
        "submit_to_promoted_s": round(promoted_s, 1),
        "total_s": round(time.monotonic() - began, 1),
        "tenant": str(json.loads((settings.home / "demo-tenant.json").read_text())["tenant"]),
        "job_id": job["id"],
        "model": adapter["name"],
        "seen_exact_match": answers.seen,
        "unseen_exact_match": answers.unseen,
    }
    write_atomically(settings.home / "demo-result.json", json.dumps(result, indent=2) + "\n")
    _summary(result, settings)
    return 0


def _question(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str]:
    """The turns before the answer, and the answer that is right."""
    return list(row["messages"][:-1]), str(row["messages"][-1]["content"])


def _answer(client: FtClient, model: str, row: Mapping[str, Any]) -> str:
    messages, _ = _question(row)
    done = client.chat.create(model=model, messages=messages, temperature=0.0, max_tokens=96)
    return str(done["choices"][0]["message"]["content"]).strip()


def _show_pair(client: FtClient, rows: Sequence[Mapping[str, Any]], adapter: str) -> None:
    row = next(r for r in rows if r["metadata"]["template"] == "seen")
    messages, wanted = _question(row)
    _say(f"ticket:   {messages[-1]['content']}")
    _say(f"base:     {shown_answer(_answer(client, MODEL, row))}")
    _say(f"adapter:  {shown_answer(_answer(client, adapter, row))}")
    _say(f"wanted:   {wanted}")


def _ask_holdout(client: FtClient, rows: Sequence[Mapping[str, Any]], adapter: str) -> Answers:
    """What the served adapter answers to tickets of both kinds of phrasing."""
    chosen = {kind: [r for r in rows if r["metadata"]["template"] == kind][:ASKED] for kind in ("seen", "unseen")}

    def right(row: Mapping[str, Any]) -> bool:
        return _answer(client, adapter, row) == _question(row)[1].strip()

    with ThreadPoolExecutor(max_workers=AT_ONCE) as executor:
        shares = {kind: sum(executor.map(right, some)) / len(some) for kind, some in chosen.items()}
    return Answers(seen=shares["seen"], unseen=shares["unseen"])


def _summary(result: Mapping[str, Any], settings: Settings) -> None:
    urls = json.loads(settings.endpoints_file.read_text())
    _headline("result")
    _say(f"exact match on the holdout: base {percent(result['base_exact_match'])}, adapter {percent(result['adapter_exact_match'])}")
    _say(
        f"asked through the API, {ASKED} tickets each: phrased as in training {percent(result['seen_exact_match'])}, "
        f"phrased otherwise {percent(result['unseen_exact_match'])}"
    )
    _say(f"submit to first step {result['submit_to_first_step_s']} s, to production {result['submit_to_promoted_s']} s")
    _headline("where to look")
    key = f"{result['tenant']}:{result['job_id']}"
    _say(f"Dagster   {urls['dagster']}/assets/adapter?partition={key}   (dataset -> pack -> checkpoint -> report -> adapter)")
    _say(f"API       {urls['api']}/v1/fine_tuning/jobs/{result['job_id']}   (key: {settings.home / 'demo-tenant.json'})")
    _say(f"report    {settings.home / 'demo-result.json'}")
    asked = f"'The PulseBand does not turn on. My order number is 482137.' --system '{tickets.SYSTEM_PROMPT}'"
    _say(f"chat      FT_API_KEY=... ft chat {result['model']} {asked}")
    _say("the stack runs on; end it with: ft down")


def _explain_failure(client: FtClient, final: Mapping[str, Any], settings: Settings) -> int:
    error = final.get("error") or {}
    _headline(f"the job {final['status']}: {error.get('code', '')}")
    _say(str(error.get("message") or "no reason was recorded"))
    for event in list(client.jobs.events(final["id"]))[:5][::-1]:
        _say(f"  {event['level']}: {event['message']}")
    _say(f"its training log: {settings.work_dir / 'launcher'}/{final['id']}-a*/log; the stack's logs: {settings.log_dir}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
