"""What ``ft down`` says of the workloads that it stopped: where each goes on."""

from __future__ import annotations

from pathlib import Path

from control_plane.platform import settings as settings_module
from control_plane.platform.protocols import Workload
from deploy.local import workloads
from resources.launcher import LocalLauncher

TRAINING, EVALUATION = "ft_assets.training.runtime", "ft_assets.evals.run.runner"


def test_each_workload_that_was_stopped_says_where_it_goes_on(tmp_path: Path) -> None:
    settings = settings_module.load({"FT_HOME": str(tmp_path)})
    launcher = LocalLauncher(settings.work_dir / "launcher")
    for name, module in (("new-a1", TRAINING), ("saved-a2", TRAINING), ("old-a1", TRAINING), ("judged-e1", EVALUATION)):
        work_dir = tmp_path / name
        launcher.start_or_adopt(Workload(name=name, module=module, run_file=tmp_path / "run.json", work_dir=work_dir))
        launcher.stop(name, grace_s=0.0)
    for name in ("saved-a2", "old-a1"):
        (tmp_path / name / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert workloads.describe_stopped(settings, ["new-a1", "saved-a2", "old-a1", "judged-e1"]).split("; ") == [
        "stopped training before its first checkpoint (starts over when the stack is up again): new-a1",
        "stopped training (resumes from its last checkpoint when the stack is up again): saved-a2, old-a1",
        "stopped evaluations (keep their answers and continue when the stack is up again): judged-e1",
    ]
    assert workloads.describe_stopped(settings, []) == ""
