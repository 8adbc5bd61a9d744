"""The backup of docs/operations/backup.md without our command: PostgreSQL's tools, and a bucket with versions."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.platform import settings as settings_module
from control_plane.platform.context import Actor, Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.audit import audit_entries
from control_plane.tenants.tables import api_keys
from core.base_models import Catalogue
from deploy.local import database_setup
from resources.database.engine import control_plane_url, make_logins
from resources.object_store.s3 import S3ObjectStore
from tests.support.servers.checked_s3 import checked_s3

SERVERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
ACCOUNT = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(not SERVERS, reason="needs Debian's postgresql")]


@pytest.fixture
def server() -> Iterator[str]:
    """A PostgreSQL server of the system that asks for passwords, with an owner that is no superuser; yields host and port."""
    home = Path(tempfile.mkdtemp(prefix="ft-pg-", dir="/tmp"))
    as_server: list[str] = []
    if os.geteuid() == 0:  # the server refuses root
        shutil.chown(home, "postgres")
        as_server = ["runuser", "-u", "postgres", "--"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home / "password").write_text("super")
    (home / "password").chmod(0o644)

    def run(*command: str) -> None:
        subprocess.run([*as_server, *command], check=True, cwd="/", capture_output=True, timeout=300)

    data, options = str(home / "data"), f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={home} -c fsync=off"
    run(str(SERVERS[-1] / "initdb"), "-D", data, "-U", "root", "--auth=scram-sha-256", f"--pwfile={home}/password")
    run(str(SERVERS[-1] / "pg_ctl"), "-D", data, "-w", "-t", "200", "-l", str(home / "log"), "-o", options, "start")
    try:
        admin = sa.create_engine(f"postgresql+psycopg2://root:super@127.0.0.1:{port}/postgres", isolation_level="AUTOCOMMIT")
        with admin.connect() as conn:
            conn.exec_driver_sql("CREATE ROLE ft_owner LOGIN CREATEROLE CREATEDB PASSWORD 'own'")
            for name in ("ft", "restored"):
                conn.exec_driver_sql(f"CREATE DATABASE {name} OWNER ft_owner")
        admin.dispose()
        yield f"127.0.0.1:{port}"
    finally:
        run(str(SERVERS[-1] / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(home)


def platform_of(server: str, name: str, home: Path, endpoint: str, models: Catalogue) -> Platform:
    env = {
        "FT_HOME": str(home), "FT_DATABASE_URL": f"postgresql+psycopg2://ft_platform:shared@{server}/{name}",
        "FT_OWNER_DATABASE_URL": f"postgresql+psycopg2://ft_owner:own@{server}/{name}",
    }  # fmt: skip
    settings = settings_module.load(env)
    objects = S3ObjectStore.connect(bucket="production", prefix="ft", endpoint_url=endpoint, **ACCOUNT)
    return Platform(logins=make_logins(control_plane_url(settings)), objects=objects, models=models, fleet=None, settings=settings)


def test_a_dump_and_a_versioned_bucket_bring_everything_back(server: str, catalogue: Catalogue, tmp_path: Path) -> None:
    import boto3

    with checked_s3() as (host, port):
        endpoint = f"http://{host}:{port}"
        s3 = boto3.client("s3", endpoint_url=endpoint, **ACCOUNT)
        s3.create_bucket(Bucket="production")
        s3.put_bucket_versioning(Bucket="production", VersioningConfiguration={"Status": "Enabled"})
        platform = platform_of(server, "ft", tmp_path / "home", endpoint, catalogue)
        database_setup.run(platform.settings)
        tenant, key = tenants.create(platform, "acme")
        platform.objects.put_bytes("tenants/acme/jobs/j/checkpoints/a1/step-1/x", b"weights")
        head = audit_entries.verify(platform).head

        moment = datetime.datetime.now(datetime.UTC)
        env = {**os.environ, "PGPASSWORD": "own"}
        connection = [f"--host={server.split(':')[0]}", f"--port={server.split(':')[1]}", "--username=ft_owner"]
        tools = SERVERS[-1]
        dumped = str(tmp_path / "ft.dump")
        subprocess.run([str(tools / "pg_dump"), *connection, "--format=custom", f"--file={dumped}", "ft"], env=env, check=True)
        time.sleep(1.1)  # S3's times have seconds
        platform.objects.delete("tenants/acme/jobs/j/checkpoints/a1/step-1/x")
        tenants.create(platform, "later")
        assert not platform.objects.exists("tenants/acme/jobs/j/checkpoints/a1/step-1/x")
        platform.logins.dispose()

        subprocess.run([str(tools / "pg_restore"), *connection, "--exit-on-error", "--dbname=restored", dumped], env=env, check=True)
        for page in s3.get_paginator("list_object_versions").paginate(Bucket="production", Prefix="ft"):
            for marker in page.get("DeleteMarkers", ()):
                if marker["IsLatest"] and marker["LastModified"] >= moment.replace(microsecond=0):
                    s3.delete_object(Bucket="production", Key=marker["Key"], VersionId=marker["VersionId"])

        restored = platform_of(server, "restored", tmp_path / "home2", endpoint, catalogue)
        database_setup.run(restored.settings)
        assert [one.id for one in tenants.list_all(restored)] == ["acme"]
        assert tenants.authenticate(restored, key.secret).tenant.id == tenant.id
        assert restored.objects.get_bytes("tenants/acme/jobs/j/checkpoints/a1/step-1/x") == b"weights"
        assert audit_entries.verify(restored, head=head).findings == ()
        tenants.create(restored, "other")
        scoped = restored.in_scope_of("acme", Actor(kind="key", id=key.id))
        with scoped.engine.connect() as conn:
            assert set(conn.execute(sa.select(api_keys.c.tenant_id)).scalars()) == {"acme"}, "row security came back with the tables"
        restored.logins.dispose()
