"""What Dagster's daemon and run workers do for one job, in one process of its own: sensors ask for runs, their assets are made.

``python -m tests.support.processes.step_runner``: the platform is the one that the environment describes; ends when the job does.
"""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from control_plane.composition import open_platform
from control_plane.platform.settings import load
from control_plane.queue.cycle import run_cycle
from control_plane.queue.launches import due_runs
from core.telemetry import logs
from ft_assets import definitions
from ft_assets.platform_resource import PlatformResource
from sensors.run_requests import run_request

ASSETS = {"prepare": ("dataset", "tokenized_pack"), "train": ("checkpoint",), "evaluate": ("eval_report", "adapter")}


def main() -> None:
    logs.configure("ft-dagster")
    platform = open_platform(load())
    assets = list(definitions.defs.assets or ())
    with dg.DagsterInstance.ephemeral() as instance:
        for stage in ("prepare", "train", "evaluate"):
            run_cycle(platform)
            (due,) = due_runs(platform, (stage,))
            _make(instance, assets, run_request(due), ASSETS[stage])


def _make(instance: dg.DagsterInstance, assets: Sequence[object], request: dg.RunRequest, names: Sequence[str]) -> None:
    instance.add_dynamic_partitions("jobs", [str(request.partition_key)])
    dg.materialize(
        assets,  # type: ignore[arg-type]
        selection=list(names),
        partition_key=request.partition_key,
        tags=dict(request.tags),
        instance=instance,
        resources={"platform": PlatformResource()},
    )


if __name__ == "__main__":
    main()
