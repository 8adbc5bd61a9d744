"""What ``ft down`` says of the workloads that it stopped: where each goes on."""

from __future__ import annotations

from pathlib import Path

from control_plane.platform import settings as settings_module
from core.workload import Kind, Workload
from deploy.local import workloads
from resources.launcher import LocalLauncher

TRAINED = {"new-a1": "new", "saved-a2": "saved", "old-a1": "old"}
"""Jobs by the workload that trains them."""


def test_each_workload_that_was_stopped_says_where_it_goes_on(tmp_path: Path) -> None:
    settings = settings_module.load({"FT_HOME": str(tmp_path)})
    launcher = LocalLauncher(settings.work_dir / "launcher")
    for name, job in TRAINED.items():
        launcher.start_or_adopt(Workload(name=name, kind=Kind.TRAIN, tenant="acme", job=job))
    evaluation = ("engine.evals.run.runner", str(tmp_path / "run.json"))
    launcher.start_or_adopt(Workload(name="judged-e1", kind=Kind.EVALUATE, command=evaluation, tenant="acme", job="judged"))
    for name in (*TRAINED, "judged-e1"):
        launcher.stop(name, grace_s=0.0)
    for job in ("saved", "old"):
        (settings.work_dir / "jobs" / job / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert workloads.describe_stopped(settings, ["new-a1", "saved-a2", "old-a1", "judged-e1"]).split("; ") == [
        "stopped training before its first checkpoint (starts over when the stack is up again): new-a1",
        "stopped training (resumes from its last checkpoint when the stack is up again): saved-a2, old-a1",
        "stopped evaluations (keep their answers and continue when the stack is up again): judged-e1",
    ]
    assert workloads.describe_stopped(settings, []) == ""
