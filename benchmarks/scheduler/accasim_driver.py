"""Runs accasim's EASY backfilling on a workload; executed by an interpreter that has accasim 1.1.3, which needs nothing of ours.

``python accasim_driver.py WORKLOAD.json RESULT.json``: in, ``{"gpus", "jobs": [[number, submit_s, num_gpus, duration_s], ...]}`` in whole
seconds; out, the start of each job by its number, for the scheduler as it is shipped and for one that hands on what it has reserved.
"""

from __future__ import annotations

import collections
import collections.abc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

collections.Mapping = collections.abc.Mapping  # type: ignore[attr-defined]  # accasim 1.1.3 was written for Python before 3.10

BASE_S = 1_000_000
"""Added to all times: accasim takes a start of zero for none."""


def starts(workload: dict[str, Any], *, honour: bool) -> dict[str, int]:
    from accasim.base.allocator_class import FirstFit
    from accasim.base.scheduler_class import EASYBackfilling
    from accasim.base.simulator_class import Simulator

    class Honouring(FirstFit):  # type: ignore[misc]
        """Is told ``reserved_nodes=[]`` by the shipped scheduler, and so takes no reservation for one; here it is told of the one node."""

        def allocating_method(
            self, es: Any, cur_time: Any, skip: bool = False, reserved_time: Any = None, reserved_nodes: Any = None
        ) -> Any:
            nodes = self.node_names if reserved_time is not None else reserved_nodes
            return super().allocating_method(es, cur_time, skip=skip, reserved_time=reserved_time, reserved_nodes=nodes)

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "system.json").write_text(
            json.dumps({"groups": {"all": {"core": workload["gpus"]}}, "resources": {"all": 1}, "equivalence": {"processor": {"core": 1}}})
        )
        lines = [f"{n} {BASE_S + s} -1 {d} {g} -1 -1 {g} {d} -1 1 1 1 -1 1 -1 -1 -1" for n, s, g, d in workload["jobs"]]
        (place / "work.swf").write_text("\n".join(lines) + "\n")
        simulator = Simulator(
            str(place / "work.swf"),
            str(place / "system.json"),
            EASYBackfilling((Honouring if honour else FirstFit)()),
            RESULTS_FOLDER_PATH=scratch,
            RESULTS_FOLDER_NAME=scratch,
            show_statistics=False,
            statistics_output=False,
            scheduling_output=True,
        )
        simulator.start_simulation()
        found = next(place.rglob("sched-*"))
        return {line.split(";")[0]: _start(line) for line in found.read_text().splitlines() if line}


def _start(line: str) -> int:
    """``id;user;queued__nodes__start;end;...`` with times as ``YYYY-MM-DD HH:MM:SS`` in UTC."""
    from datetime import UTC, datetime

    text = line.split("__")[-1].split(";")[0]
    return int(datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()) - BASE_S


if __name__ == "__main__":
    body = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({"shipped": starts(body, honour=False), "honouring": starts(body, honour=True)}))
