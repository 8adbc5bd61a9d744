"""The ``checkpoint`` asset: one training attempt, followed until it ends."""

import dagster as dg

from engine.data import markdown_picture
from engine.training import loss_curve_svg
from ft_assets.partitions import JOBS
from ft_assets.platform_resource import PlatformResource, job_metadata, job_step
from ft_assets.training import step


@dg.asset(partitions_def=JOBS, group_name="training", code_version="1", kinds={"pytorch"}, deps=["tokenized_pack"])
def checkpoint(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """The trained weights of a job. Needs a reservation. If the step process dies, its replacement adopts the running workload."""
    with job_step(context, platform) as (opened, tenant, job_id):
        trained = step.train(opened, platform.launcher.open(), tenant, job_id, say=context.log.info)
    if not trained.succeeded:
        raise dg.Failure(description=trained.failure, allow_retries=False)
    held, stored = trained.held, step.checkpoint_of(opened, trained.held)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(stored.manifest_sha256),
        metadata={
            "loss_curve": dg.MetadataValue.md(markdown_picture(loss_curve_svg(stored.measurements), title="loss over optimizer steps")),
            "final_loss": stored.last("loss"),
            **{f"final_loss/{s.dataset_id}": stored.last(f"train_loss/{s.dataset_id}") for s in held.spec.sources},
            "steps": trained.last_step,
            "trained_tokens": trained.trained_tokens,
            "tokens_per_s": stored.last("tokens_per_s"),
            "attempts": held.attempt,
            "spec_sha256": held.spec.sha256,
            "recipe": held.spec.recipe,
            "files": dg.MetadataValue.path(stored.uri),
            **job_metadata(context, opened),
        },
    )
