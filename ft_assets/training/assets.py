"""The ``checkpoint`` asset: one attempt of training, followed to its end."""

import dagster as dg

from control_plane.attempts import follow, watcher
from control_plane.attempts import service as attempts
from control_plane.attempts.checkpoints import upload
from control_plane.jobs import results
from control_plane.platform.job_states import JobState
from ft_assets.evals import step as run
from ft_assets.partitions import JOBS, parse
from ft_assets.platform_resource import PlatformResource, owned_by, watched
from ft_assets.training.loss_curve_svg import loss_curve_svg
from resources.dagster.pictures import picture
from resources.dagster.run_tags import runs_of_job


@dg.asset(partitions_def=JOBS, group_name="training", code_version="1", kinds={"pytorch"}, deps=["tokenized_pack"])
def checkpoint(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """The trained weights of a job. Needs a reservation; a step that died is replaced and adopts the running workload."""
    tenant, job_id = parse(context.partition_key)
    opened = platform.get()
    with watched(context), owned_by(opened, tenant, job_id):
        launcher = platform.launcher()
        held = follow.take(opened, launcher, tenant, job_id)
        ending = follow.follow(opened, launcher, held, say=context.log.info)
        state = attempts.finish(opened, held, ending)
    watcher.flush(opened)
    if state is not JobState.EVALUATING:
        why = ending.failure.message if ending.failure else f"the job is {state}"
        raise dg.Failure(description=f"attempt {held.attempt}: {why}; the job is {state} now", allow_retries=False)
    lines = results.metric_lines(opened, job_id)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(attempts.committed(opened, job_id)[0].manifest_sha256),
        metadata={
            "loss_curve": picture(loss_curve_svg(lines), title="loss over optimizer steps"),
            "final_loss": next(m["loss"] for m in reversed(lines) if "loss" in m),
            "steps": ending.last_step,
            "trained_tokens": ending.trained_tokens,
            "tokens_per_s": next((m["tokens_per_s"] for m in reversed(lines) if m.get("tokens_per_s")), 0.0),
            "attempts": held.attempt,
            "cost_usd": run.cost_micros(opened, job_id) / 1e6,
            "spec_sha256": held.spec.sha256,
            "recipe": held.spec.recipe,
            "files": dg.MetadataValue.path(opened.objects.uri(upload.final_prefix(tenant, job_id, held.attempt))),
            "runs_of_job": dg.MetadataValue.url(runs_of_job(job_id)),
        },
    )
