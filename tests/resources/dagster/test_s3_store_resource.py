"""A bucket behind Dagster: the object store takes its client's configuration, and the output of steps is stored beside the objects."""

import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from control_plane.platform.settings import load
from deploy.local.stack_services import dagster_home, prepare_home
from ft_assets.platform_resource import PlatformResource
from resources.dagster.dagster_records import delete_run
from resources.dagster.s3_store_resource import S3StoreResource


@pytest.fixture
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    told = {
        "FT_HOME": str(tmp_path), "FT_OBJECT_STORE": "s3://bucket/deep", "AWS_ENDPOINT_URL": s3_endpoint, "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    return "bucket"


def keys(bucket: str) -> list[str]:
    return [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])]


@pytest.mark.usefixtures("bucket")
def test_the_store_of_the_platform_is_the_bucket_and_takes_the_resources_client(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PlatformResource().get().objects.put_bytes("k", b"one")
    assert keys("bucket") == ["deep/k"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    given = S3StoreResource(url="s3://bucket/deep", s3=S3Resource(endpoint_url=s3_endpoint, region_name="us-east-1"))
    platform = PlatformResource(objects=given).get()
    assert platform.objects.get_bytes("k") == b"one"
    assert platform is PlatformResource(objects=given.model_copy()).get(), "equal configuration shares connections"


@dg.op
def speak() -> None:
    sys.stdout.write("a line of output")
    sys.stdout.flush()


@dg.job(executor_def=dg.in_process_executor)
def talk() -> None:
    speak()


def test_the_output_of_steps_is_stored_in_the_bucket_and_deleted_with_its_run(bucket: str) -> None:
    prepare_home(load())
    home = dagster_home(load())
    written = (home / "dagster.yaml").read_text()
    before, _, after = written.partition("storage:\n")
    storage, _, rest = after.partition("\nrun_coordinator:")
    assert "PooledPostgresStorage" in storage
    (home / "dagster.yaml").write_text(f"{before}\nrun_coordinator:{rest}")  # without PostgreSQL: the storage plays no part here
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert type(instance.compute_log_manager).__name__ == "S3ComputeLogManager"
        run_id = talk.execute_in_process(instance=instance).run_id
        stored = [key for key in keys(bucket) if run_id in key]
        assert stored and all(key.startswith(f"deep/dagster/storage/{run_id}/compute_logs/") for key in stored)
        bodies = [boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read() for key in stored]
        assert b"a line of output" in bodies
        delete_run(instance, run_id)
    assert [key for key in keys(bucket) if run_id in key] == []


def test_a_local_store_keeps_the_output_of_steps_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    prepare_home(load())
    assert "compute_logs" not in (dagster_home(load()) / "dagster.yaml").read_text()
