"""What MLflow records about a tenant is erased for good, also what somebody deleted there before; another tenant's records stay."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from resources.tracking import mlflow_records
from resources.tracking.mlflow_tracker import older_artifacts

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    before = dict(os.environ)
    yield tmp_path / "mlflow.db"
    os.environ.clear()
    os.environ.update(before)


def test_every_run_text_and_artifact_of_a_tenant_is_erased_and_another_tenants_stay(file: Path) -> None:
    uri = f"sqlite:///{file}"
    assert mlflow_records.search(uri, "acme")["found"] == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    for tenant in ("acme", "other"):
        tags = {"ft.tenant": tenant}
        experiment = client.create_experiment(tenant, tags=tags)
        for n in range(2):
            run = client.create_run(experiment, tags=tags).info.run_id
            client.log_param(run, "template", f"plan {n} of {tenant}. " * 300)  # over several pages of the file
        client.delete_run(run)
        older_artifacts(file, tenant).mkdir(parents=True)
        (older_artifacts(file, tenant) / "samples.jsonl").write_text("a row")
    with closing(sqlite3.connect(file)) as conn, conn:  # by an SQLite that does not overwrite what it deletes
        conn.execute("PRAGMA secure_delete = OFF")
        conn.execute("DELETE FROM params WHERE value LIKE 'plan 0 of acme%'")
    assert b"plan 0 of acme" in file.read_bytes()
    assert mlflow_records.search(uri, "acme")["found"] == ["1 experiments", "2 runs", "1 artifacts"]
    assert mlflow_records.erase(uri, "acme") == {"runs": 2, "experiments": 1}
    assert mlflow_records.search(uri, "acme")["found"] == []
    assert not older_artifacts(file, "acme").exists()
    assert b"of acme" not in file.read_bytes()
    assert mlflow_records.search(uri, "other")["found"] == ["1 experiments", "2 runs", "1 artifacts"]
