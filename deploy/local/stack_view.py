"""Shows the stack while it starts and stops: a live line per service on a terminal, otherwise a line per change."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from deploy.local.supervisor.stack_report import Phase, ServiceReport, ServiceState, StackReport
from ft_client.cli.output import console, escape, say

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

S = ServiceState
MARKS = {S.WAITING: "[dim]-", S.UP: "[green]ok", S.DONE: "[green]ok", S.DOWN: "[dim]-", S.FAILED: "[red]!!"}
"""All other states are transitional."""


class StackView:
    """Return a callable for the supervisor's reports; a context manager, because a live display must be closed."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._last: StackReport | None = None
        self._began = time.time()
        self._was_ready = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(get_renderable=self._render, console=console(stderr=True), refresh_per_second=8, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, report: StackReport) -> None:
        before, self._last = self._last, report
        if report.message and (before is None or report.message != before.message):
            self._line(report.message)
        if self._live is None:
            self._plain(before, report)
        if report.phase is Phase.READY and not self._was_ready:
            self._was_ready = True
            self._ready(report)

    def _ready(self, report: StackReport) -> None:
        self._line(f"ready in {time.time() - self._began:.1f} s")
        for s in report.services:
            if s.url and s.url.startswith("http"):
                self._line(f"  {s.name:<10} {s.url}")

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(escape(text))
        else:
            say(text)

    def _plain(self, before: StackReport | None, report: StackReport) -> None:
        old = {s.name: s.state for s in before.services} if before else {}
        for s in report.services:
            if s.state is not old.get(s.name) and s.state is not S.WAITING:
                say(f"{time.time() - self._began:6.1f} s  {s.name:<10} {s.state}{_detail(s)}")

    def _render(self) -> Table:
        from rich.table import Table

        made = Table.grid(padding=(0, 2))
        for s in self._last.services if self._last else ():
            mark = MARKS.get(s.state, "[yellow]..")
            seconds = f"{time.time() - s.since:.0f} s" if s.state in (S.STARTING, S.STOPPING) and s.since else ""
            made.add_row(mark, s.name, str(s.state), escape(s.detail if s.detail != s.state else ""), seconds)
        return made


def _detail(s: ServiceReport) -> str:
    return f" ({s.detail})" if s.detail and s.detail != s.state else ""
