"""A bucket behind Dagster: the object store takes its client's configuration, and the output of steps is objects of the store."""

import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import dagster as dg
import httpx
import pytest
from dagster._core.test_utils import create_run_for_test
from dagster_aws.s3 import S3Resource

from control_plane.platform.settings import load
from deploy.local.stack_services import dagster_home, prepare_home
from ft_assets.platform_resource import PlatformResource
from resources.dagster.dagster_records import delete_run
from resources.dagster.private_api import ComputeIOType, LocalComputeLogManager
from resources.dagster.s3_store_resource import S3StoreResource
from resources.dagster.step_logs import StepLogs


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


def instance_of(home: Path) -> dg.DagsterInstance:
    """The instance of ``ft up`` without PostgreSQL: the storage plays no part here."""
    written = (home / "dagster.yaml").read_text()
    before, _, after = written.partition("storage:\n")
    storage, _, rest = after.partition("\nrun_coordinator:")
    assert "PooledPostgresStorage" in storage
    (home / "dagster.yaml").write_text(f"{before}\nrun_coordinator:{rest}")
    return dg.DagsterInstance.from_config(str(home))


def test_the_output_of_steps_is_stored_in_the_bucket_and_deleted_with_its_run(bucket: str) -> None:
    prepare_home(load())
    with instance_of(dagster_home(load())) as instance:
        runs = [talk.execute_in_process(instance=instance, tags=tags).run_id for tags in ({}, {"ft/tenant": "acme"})]
        for run_id, place in zip(runs, ("deep/dagster", "deep/tenants/acme/dagster"), strict=True):
            stored = [key for key in keys(bucket) if run_id in key]
            assert stored and all(key.startswith(f"{place}/{run_id}/compute_logs/") for key in stored)
            bodies = [boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read() for key in stored]
            assert b"a line of output" in bodies
            (log_key,) = instance.compute_log_manager.get_log_keys_for_log_key_prefix([run_id, "compute_logs"], ComputeIOType.STDOUT)
            link = instance.compute_log_manager.get_log_metadata(log_key).stdout_download_url
            assert link is not None and httpx.get(link).content == b"a line of output"
        delete_run(instance, runs[1])
        assert [any(run_id in key for key in keys(bucket)) for run_id in runs] == [True, False]


def test_a_local_store_keeps_the_output_of_steps_as_objects_with_the_tenants_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    monkeypatch.setenv("FT_TENANT_KEY", "local")
    prepare_home(load())
    with instance_of(dagster_home(load())) as instance:
        run_id = talk.execute_in_process(instance=instance, tags={"ft/tenant": "acme"}).run_id
        logs = instance.compute_log_manager
        (log_key,) = logs.get_log_keys_for_log_key_prefix([run_id, "compute_logs"], ComputeIOType.STDOUT)
        assert logs.is_capture_complete(log_key)
        assert logs.get_log_data(log_key).stdout == b"a line of output"
        assert logs.get_log_data_for_type(log_key, ComputeIOType.STDOUT, offset=2, max_bytes=4) == (b"line", 6)
        assert logs.get_log_metadata(log_key).stdout_download_url is None
        (written,) = tmp_path.glob(f"objects/tenants/acme/dagster/{run_id}/compute_logs/*.out")
        assert b"line" not in written.read_bytes()
        assert [path for path in tmp_path.rglob("*") if path.is_file() and b"a line of output" in path.read_bytes()] == []


def test_output_of_a_running_step_is_readable_elsewhere_and_empty_output_of_a_sensor_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    prepare_home(load())
    with instance_of(dagster_home(load())) as instance:
        logs, elsewhere = instance.compute_log_manager, StepLogs()
        run = create_run_for_test(instance, tags={"ft/tenant": "acme"})
        log_key = [run.run_id, "compute_logs", "train"]
        with logs.capture_logs(log_key):
            sys.stdout.write("so far")
            sys.stdout.flush()
            logs.on_progress(log_key)
            (part,) = tmp_path.glob("objects/tenants/acme/dagster/*/compute_logs/train.out.partial")
            assert part.read_bytes() == b"so far"
            elsewhere._local = LocalComputeLogManager(str(tmp_path / "another machine"))
            elsewhere.register_instance(instance)
            assert elsewhere.get_log_data(log_key).stdout == b"so far" and not elsewhere.is_capture_complete(log_key)
        assert elsewhere.is_capture_complete(log_key)
        assert sorted(path.name for path in part.parent.iterdir()) == ["train.err", "train.out"]
        for text in ("", "granted"):
            with logs.open_log_stream(["__repository__", "admission", f"tick{text}"], ComputeIOType.STDERR) as stream:
                assert stream is not None
                stream.write(text)
        assert list(logs.shared()) == [("dagster/__repository__/admission/tickgranted.err", "granted")]
