"""Erases a tenant's records in MLflow and searches for what is left: its experiment with all runs, and its registered models.

MLflow keeps deleted runs until ``mlflow gc`` removes them, which needs the tracking store's database. On a tracking server, runs are
therefore only marked as deleted, and the tenant's deletion waits until ``mlflow gc`` has run there.
``python -m resources.tracking.mlflow_records`` reads a request from standard input (:mod:`resources.tenant_records`).
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from core.telemetry.redaction import without_credentials
from resources.tracking.mlflow_tracker import file_of, older_artifacts, open_client
from resources.tracking.model_registry import search_all

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TENANT = "ft.tenant"
"""Tag of experiments, runs and registered models."""


def erase(uri: str, tenant: str) -> dict[str, int]:
    """Delete everything with the tenant's tag and return counts by kind."""
    client = open_client(uri)
    models, experiments = _models(client, tenant), _experiments(client, tenant)
    for name in models:
        client.delete_registered_model(name)
    ids = [experiment.experiment_id for experiment in experiments]
    runs = _runs(client, ids)
    active = [run.info.run_id for run in runs if run.info.lifecycle_stage == "active"]
    for run_id in active:
        client.delete_run(run_id)
    for experiment in experiments:
        if experiment.lifecycle_stage == "active":
            client.delete_experiment(experiment.experiment_id)
    if uri.startswith("http"):
        counts = {"registered_models": len(models), "runs": len(active)}
    else:
        _remove_for_good(uri, tenant, [run.info.run_id for run in runs], ids)
        counts = {"registered_models": len(models), "runs": len(runs), "experiments": len(ids)}
    return {kind: count for kind, count in counts.items() if count}


def search(uri: str, tenant: str) -> dict[str, Any]:
    """Report the tenant's records, including those marked as deleted."""
    client, file, served = open_client(uri), file_of(uri), uri.startswith("http")
    everywhere = [e.experiment_id for e in search_all(client.search_experiments, view_type=_all())]
    left = {
        "experiments": len(_experiments(client, tenant)),
        "runs": len(_runs(client, everywhere, f"tags.`{TENANT}` = '{tenant}'")),
        "registered models": len(_models(client, tenant)),
        "model versions": sum(v.tags.get(TENANT) == tenant for v in search_all(client.search_model_versions)),
        "artifacts": sum(p.is_file() for p in older_artifacts(file, tenant).rglob("*")) if file else 0,
    }
    gc = "; run `mlflow gc` on the server, which keeps deleted runs until then" if served else ""
    return {
        "store": f"mlflow {without_credentials(uri)}",
        "searched": [kind for kind in left if kind != "artifacts"] + ([f"{older_artifacts(file, tenant)}/"] if file else []),
        "found": [f"{count} {kind}{gc}" for kind, count in left.items() if count],
        "not_searched": ["artifacts that other tools stored in the server's artifact store"] if served else [],
    }


def _all() -> int:
    from mlflow.entities import ViewType

    return int(ViewType.ALL)


def _experiments(client: MlflowClient, tenant: str) -> list[Any]:
    tagged = list(search_all(client.search_experiments, view_type=_all(), filter_string=f"tags.`{TENANT}` = '{tenant}'"))
    named = client.get_experiment_by_name(tenant)
    return tagged or ([named] if named else [])


def _runs(client: MlflowClient, experiments: list[str], filter_string: str = "") -> list[Any]:
    """List the experiments' runs, including those marked as deleted."""
    if not experiments:
        return []
    return list(search_all(client.search_runs, experiment_ids=experiments, filter_string=filter_string, run_view_type=_all()))


def _models(client: MlflowClient, tenant: str) -> list[str]:
    return [m.name for m in search_all(client.search_registered_models) if m.tags.get(TENANT) == tenant]


def _remove_for_good(uri: str, tenant: str, runs: list[str], experiments: list[str]) -> None:
    """Remove runs and experiments marked as deleted. `mlflow gc` would also remove those of others. Experiments go last: while one exists,
    an interrupted call is repeated."""
    from mlflow.tracking._tracking_service.utils import _get_store

    store, file = _get_store(uri), file_of(uri)  # type: ignore[no-untyped-call]
    for run_id in runs:
        store._hard_delete_run(run_id)
    if file is not None:
        shutil.rmtree(older_artifacts(file, tenant), ignore_errors=True)
        with closing(sqlite3.connect(file)) as conn:
            conn.execute("VACUUM")  # deleted rows stay readable in the file until their pages are used again
    for experiment_id in experiments:
        store._hard_delete_experiment(experiment_id)


def main() -> None:
    order: Mapping[str, str] = json.load(sys.stdin)
    call = {"erase": erase, "search": search}[order["call"]]
    sys.stdout.write("\n" + json.dumps(call(order["uri"], order["tenant"])) + "\n")


if __name__ == "__main__":
    main()
