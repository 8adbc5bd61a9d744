"""The ``dataset`` and ``tokenized_pack`` assets: pin a job's dataset version, and tokenize and pack it for training.

They start at ``validated_dataset``, which no run produces: the sensor ``validated_datasets`` reports it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import dagster as dg

from control_plane.composition import open_platform
from control_plane.platform.settings import load
from engine.data import histogram_svg, markdown_picture
from ft_assets.datasets import step
from ft_assets.partitions import DATASETS, JOBS, PinnedVersions, parse, partition_key
from ft_assets.platform_resource import VALIDATED, PlatformResource, check, checked, job_metadata, job_step, table
from resources.dagster.run_tags import page_of_asset

validated_dataset = dg.AssetSpec(
    VALIDATED,
    partitions_def=DATASETS,
    group_name="datasets",
    kinds={"parquet"},
    description="An uploaded file that passed validation, as an immutable version named after its content and settings.",
)


def _versions_of(job: str) -> list[str]:
    tenant, job_id = parse(job)
    return [partition_key(tenant, version) for version in step.versions_of(open_platform(load()), tenant, job_id)]


PINNED = dg.AssetDep(validated_dataset, partition_mapping=PinnedVersions(_versions_of))
VALID = check("valid", asset="dataset", description="Did validation find nothing to warn about?")
EXACT = check("packing_exact", asset="tokenized_pack", description="Do the files hold exactly what the manifest states?")


@dg.asset(partitions_def=JOBS, group_name="datasets", code_version="1", kinds={"parquet"}, deps=[PINNED], check_specs=[VALID])
def dataset(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """The immutable dataset versions that this job is pinned to; the data version is the content's hash."""
    with job_step(context, platform) as (opened, tenant, job_id):
        reported = step.announcer(opened, job_id, say=context.log.info)
        pinned = step.pin_dataset(opened, tenant, job_id, progress=reported)
    warnings = [f"{w['code']}: {w['message']}" for w in pinned.report.warnings]
    return dg.MaterializeResult(
        check_results=[checked(VALID.name, lambda: warnings)],
        data_version=dg.DataVersion(pinned.data_version),
        metadata={
            "dataset_id": pinned.dataset_id,
            VALIDATED: dg.MetadataValue.url(page_of_asset(VALIDATED, partition=partition_key(tenant, pinned.dataset_id))),
            **({"mixed_datasets": list(pinned.mixed_ids)} if pinned.mixed_ids else {}),
            "validation_dataset_id": pinned.validation_id or "split off automatically",
            "rows": pinned.row_count,
            "format": pinned.report.format_reason,
            "warnings": warnings,
            "report": dg.MetadataValue.md(pinned.report.to_markdown()),
            "uri": dg.MetadataValue.path(pinned.uri),
            **job_metadata(context, opened),
        },
    )


@dg.asset(partitions_def=JOBS, group_name="datasets", code_version="1", kinds={"parquet"}, deps=[dataset], check_specs=[EXACT])
def tokenized_pack(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """The dataset, tokenized once and packed as its method requires; reused by every job with the same fingerprint.

    The reference log-probabilities that the method needs are named here, and computed by the first training that needs them.
    """
    with job_step(context, platform) as (opened, tenant, job_id):
        reported = step.announcer(opened, job_id, say=context.log.info)
        packed = step.pack(opened, tenant, job_id, progress=reported, say=context.log.info)
    manifest, compared = packed.manifest, packed.reference
    return dg.MaterializeResult(
        check_results=[checked(EXACT.name, lambda: step.pack_differences(opened, tenant, packed.manifests))],
        data_version=dg.DataVersion(packed.data_version),
        metadata={
            "lengths": dg.MetadataValue.md(
                markdown_picture(histogram_svg(**packed.lengths, unit="tokens per example"), title="tokens per example")
            ),
            "packs": table(packed.rows),
            "reused": packed.reused,
            "fingerprint": manifest.fingerprint,
            "examples": manifest.num_examples,
            "kind": manifest.kind,
            "rows": manifest.num_rows,
            "tokens": manifest.num_tokens,
            "trained_tokens": manifest.num_trained_tokens,
            "fill": manifest.fill,
            "total_steps": packed.total_steps,
            "spec_sha256": packed.spec_sha256,
            "files": dg.MetadataValue.path(packed.uri),
            **({} if manifest.num_desirable is None else {"good": manifest.num_desirable, "bad": manifest.num_undesirable or 0}),
            **({"sources": [asdict(source) for source in packed.sources]} if packed.sources else {}),
            **({} if compared is None else _reference_metadata(compared)),
            **job_metadata(context, opened),
        },
    )


def _reference_metadata(compared: step.Reference) -> Mapping[str, Any]:
    """Returns the reference for the answers, and its location."""
    return {
        "reference": compared.key,
        "reference_reused": compared.stored,
        "reference_precision": compared.precision,
        "reference_quantization": compared.quantization or "none",
        "reference_adapter": compared.adapter or "none",
        "reference_files": dg.MetadataValue.path(compared.uri),
    }
