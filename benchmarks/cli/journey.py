"""The same journey with `ft` and with the console: a file with other columns -> a valid one -> job -> evaluation -> promotion -> chat.

    FT_HOME=DIR python -m benchmarks.cli.journey [--out benchmarks/journey_cpu_202611.json]

Needs a stack that runs in ``FT_HOME`` (`ft up --detach`) and Chromium. Each way has a tenant of its own. Of each step it takes the seconds
until its result is there, and what a person does: commands, keys and clicks. Pasting an id counts as one key. The job's own time, from its
creation to its end as the API states it, is that of the platform; what is left is the interaction: processes, pages, transfers, polling.

A program drives the browser. The time that a person would take is estimated with the keystroke-level model (Card, Moran and Newell 1980):
0.2 s a key (55 words a minute), 1.1 s to point and 0.2 s to click, 0.4 s to move a hand to the mouse and as much back, 1.35 s to think
before each step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from control_plane.platform.settings import load
from ft_client.demo import tickets
from tests.support.processes.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

FT = Path(sys.executable).parent / "ft"
MODEL, SUFFIX = "demo-llama-3m", "tickets"
QUESTION = "The PulseBand does not turn on. My order number is 482137."
KEY_S, POINT_S, CLICK_S, HAND_S, THINK_S = 0.2, 1.1, 0.2, 0.4, 1.35
TIMEOUT_MS = 3_600_000


@dataclass(kw_only=True)
class Step:
    """One step of the journey."""

    name: str
    waited_s: float = 0.0
    commands: int = 0
    keys: int = 0
    clicks: int = 0

    @property
    def person_s(self) -> float:
        """Estimated time of a person who knows the way."""
        moved = 2 * HAND_S if self.clicks else 0.0
        return THINK_S + self.keys * KEY_S + self.clicks * (POINT_S + CLICK_S) + moved


@dataclass(kw_only=True)
class Journey:
    steps: list[Step] = field(default_factory=list)
    job_s: float = 0.0
    """From the creation of the job to its end."""
    model: str = ""

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        began, made = time.monotonic(), Step(name=name)
        yield made
        made.waited_s = time.monotonic() - began
        self.steps.append(made)
        print(f"  {name:<40} {made.waited_s:7.1f} s", flush=True)

    def result(self) -> dict[str, Any]:
        waited = sum(step.waited_s for step in self.steps)
        return {
            "commands": sum(s.commands for s in self.steps), "keys": sum(s.keys for s in self.steps),
            "clicks": sum(s.clicks for s in self.steps), "person_s": round(sum(s.person_s for s in self.steps), 1),
            "waited_s": round(waited, 1), "job_s": round(self.job_s, 1), "around_the_job_s": round(waited - self.job_s, 1),
            "steps": [{**asdict(s), "waited_s": round(s.waited_s, 1), "person_s": round(s.person_s, 1)} for s in self.steps],
        }  # fmt: skip


def write_file(directory: Path) -> Path:
    """Write the demo's tickets under names that nothing reads without a mapping."""
    rows = [json.loads(line)["messages"] for line in tickets.files()[tickets.TICKETS].splitlines()]
    asked = [(next(m["content"] for m in row if m["role"] == "user"), row[-1]["content"]) for row in rows]
    path = directory / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": q, "ground_truth": a}) + "\n" for q, a in asked))
    return path


def with_commands(url: str, key: str, file: Path, home: Path) -> Journey:
    """Go the way with `ft`, in a fresh home."""
    made = Journey()
    env = {name: value for name, value in os.environ.items() if not name.startswith("FT_")} | {"HOME": str(home), "FT_API_URL": url}

    def ft(step: Step, *words: str, ok: tuple[int, ...] = (0,)) -> str:
        typed = " ".join(["ft", *(f"'{word}'" if " " in word else word for word in words)])
        pasted = re.sub(r"ftjob-\w+|ft:[\w:.-]+|ft-sk-[\w-]+", "x", typed)
        step.commands, step.keys = step.commands + 1, step.keys + len(pasted) + 1
        done = subprocess.run([str(FT), *words], env=env, cwd=file.parent, capture_output=True, text=True, timeout=TIMEOUT_MS / 1000)
        if done.returncode not in ok:
            raise SystemExit(f"{typed} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    with made.step("sign in") as step:
        ft(step, "--api-key", key, "login")
    with made.step("see why the file is refused") as step:
        assert "--map" in ft(step, "check", file.name, ok=(1,))
    with made.step("upload it mapped, and train") as step:
        ft(step, "submit", file.name, "--map", "question=prompt,ground_truth=completion", "--suffix", SUFFIX, "--no-promote", "--wait")
    job = newest_job(url, key)
    made.job_s, made.model = job["finished_at"] - job["created_at"], job["fine_tuned_model"]
    with made.step("read the evaluation") as step:
        ft(step, "eval", job["id"])
    with made.step("promote") as step:
        ft(step, "promote", made.model)
    with made.step("chat") as step:
        assert ft(step, "chat", made.model, QUESTION).strip()
    return made


class Hands:
    """What a person does on a page."""

    def __init__(self, page: Page, step: Step) -> None:
        self.page, self._step = page, step

    def click(self, target: Locator) -> None:
        target.click()
        self._step.clicks += 1

    def write(self, target: Locator, text: str, *, pasted: bool = False) -> None:
        """Click into a field and write."""
        target.fill(text)
        self._step.clicks += 1
        self._step.keys += 1 if pasted else len(text)

    def choose(self, target: Locator, value: str) -> None:
        """Open a list and choose: two clicks."""
        target.select_option(value)
        self._step.clicks += 2

    def choose_file(self, button: str, file: Path) -> None:
        """Press the button, choose the file in the system's window, and confirm: three clicks."""
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_text(button, exact=True).click()
        chooser.value.set_files(str(file))
        self._step.clicks += 3


def with_console(url: str, key: str, file: Path) -> Journey:
    """Go the way in a browser, by links and buttons only."""
    made = Journey()
    with chromium() as browser:
        page = browser.new_page(base_url=url, viewport={"width": 1280, "height": 850})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto("/console")
        named: Callable[..., Locator] = page.get_by_role
        with made.step("sign in") as step:
            hands = Hands(page, step)
            hands.write(page.get_by_label("API key"), key, pasted=True)
            hands.click(named("button", name="Sign in"))
            named("heading", name="Overview").wait_for()
        with made.step("see why the file is refused") as step:
            hands = Hands(page, step)
            hands.click(named("link", name="Datasets"))
            hands.click(named("link", name="Upload files").first)
            hands.choose_file("Choose files", file)
            page.get_by_text("Not valid", exact=True).wait_for()
        with made.step("upload it mapped, and train") as step:
            hands = Hands(page, step)
            hands.click(named("button", name="Upload with this mapping"))
            hands.click(named("link", name="Open dataset"))
            hands.click(named("link", name="New job"))
            page.locator("[data-price]").filter(has_text="$").wait_for()
            hands.write(page.get_by_label("Name suffix"), SUFFIX)
            hands.click(page.get_by_label("Promote the model when it passes"))
            hands.click(named("button", name="Start job"))
            page.wait_for_url("**/console/jobs/ftjob-*")
            page.get_by_text("The model is ready").or_(page.get_by_text("The adapter did not pass")).wait_for()
        job = newest_job(url, key)
        made.job_s, made.model = job["finished_at"] - job["created_at"], job["fine_tuned_model"]
        with made.step("read the evaluation") as step:
            hands = Hands(page, step)
            hands.click(named("link", name="evaluation", exact=True))
            named("heading", name="Answers side by side").wait_for()
        with made.step("promote") as step:
            hands = Hands(page, step)
            hands.click(named("link", name="Models"))
            hands.click(page.get_by_text(made.model, exact=False).first)
            hands.click(named("button", name="Promote", exact=True))
            hands.click(named("dialog").get_by_role("button", name="Promote"))
            page.get_by_text("The model is in production.").wait_for()
        with made.step("chat") as step:
            hands = Hands(page, step)
            hands.click(named("link", name="Playground"))
            hands.choose(page.get_by_label("Model", exact=True), made.model)
            hands.write(page.get_by_label("Message", exact=True), QUESTION)
            hands.click(named("button", name="Send"))
            page.locator('[data-side="left"] [data-time]').filter(has_text="s").wait_for()
    return made


def newest_job(url: str, key: str) -> Mapping[str, Any]:
    answer = httpx.get(f"{url}/v1/fine_tuning/jobs", headers={"authorization": f"Bearer {key}"}, params={"limit": 1}, timeout=60)
    job: Mapping[str, Any] = answer.raise_for_status().json()["data"][0]
    if job["status"] != "succeeded" or not job["fine_tuned_model"]:
        raise SystemExit(f"the job ended as {job['status']}: {job.get('error')}")
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = load()
    if not settings.endpoints_file.exists():
        raise SystemExit(f"no stack is ready in {settings.home}; start one with `ft up --detach`")
    url = str(json.loads(settings.endpoints_file.read_text())["api"])
    measured: dict[str, Any] = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1), "model": MODEL}
    with tempfile.TemporaryDirectory(prefix="ft-journey-") as home:
        file = write_file(Path(home))
        measured["rows"] = len(file.read_text().splitlines())
        for way, go in {
            "ft": lambda key: with_commands(url, key, file, Path(home)),
            "console": lambda key: with_console(url, key, file),
        }.items():
            print(way, flush=True)
            measured[way] = go(new_tenant(way)).result()
    print(json.dumps(measured, indent=1))
    if given.out:
        given.out.write_text(json.dumps(measured, indent=1) + "\n")


def new_tenant(way: str) -> str:
    """Return the key of a new tenant."""
    name = f"journey-{way}-{int(time.time())}"
    made = subprocess.run([str(FT), "admin", "tenants", "create", name, "--json"], capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["api_key"])


if __name__ == "__main__":
    main()
