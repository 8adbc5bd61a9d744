"""Checks of what every installation has: database, object store, API, Dagster, inference servers."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from control_plane.composition import adapters_volume, open_platform
from control_plane.platform.secrets import dagster_token, inference_token
from control_plane.serving import own_servers
from deploy.doctor.check_findings import Check, Finding, Site, clock, date_header, ok, problem, skipped, warning
from deploy.doctor.fixes import elsewhere, restart, upgrade
from deploy.local import readiness
from deploy.local.supervisor.service_spec import Readiness
from resources.database import migrate
from resources.database.engine import OPERATOR, PLATFORM, TENANT, control_plane_url, make_engine, without_password
from resources.inference.fleet_client import HttpFleet
from resources.launcher import on_kubernetes
from resources.object_store.probe import PREFIX, probe

OLDEST_POSTGRESQL = 15
PROBE = b"a probe of ft admin doctor"
ROLES = """
SELECT current_user, (SELECT count(*) FROM pg_class WHERE relrowsecurity), ARRAY(
  SELECT rolname FROM pg_roles r WHERE rolname = ANY(:roles) AND (rolsuper OR rolbypassrls OR EXISTS (
    SELECT FROM pg_class c WHERE c.relowner = r.oid AND c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p'))))
"""
"""The login, the tables with row-level security, and the logins that it does not hold for: superusers, BYPASSRLS, owners of tables."""


def database(site: Site) -> Iterator[Finding]:
    url = control_plane_url(site.settings)
    engine = make_engine(url, pool_size=1, max_overflow=0)
    try:
        with engine.connect() as conn:
            yield version(int(conn.exec_driver_sql("SHOW server_version_num").scalar_one()))
            yield _schema(migrate.revision_of(conn))
            yield _roles(conn)
            asked = site.clock()
            at = conn.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())::float8").scalar_one()
            yield clock("the database", at, at, asked=asked, answered=site.clock())
    except OperationalError as error:
        yield problem(f"{without_password(url)} does not answer: {str(error.orig).strip().partition(chr(10))[0]}", _start_database(site))
    finally:
        engine.dispose()


def _start_database(site: Site) -> str:
    return "ft up" if site.settings.embedded_database else f'psql "{without_password(control_plane_url(site.settings))}"'


def version(number: int) -> Finding:
    """Judge the server's version, given as ``server_version_num``."""
    major, minor = divmod(number, 10_000)
    found = f"PostgreSQL {major}.{minor} ({OLDEST_POSTGRESQL} or later)"
    if major >= OLDEST_POSTGRESQL:
        return ok(found)
    return problem(found, f"upgrade the server to PostgreSQL {OLDEST_POSTGRESQL} or later: pg_upgrade --help")


def _schema(revision: str | None) -> Finding:
    if revision == migrate.head():
        return ok(f"schema at revision {revision}, this version's")
    return problem(f"schema at revision {revision}, this version needs {migrate.head()}", upgrade())


def _roles(conn: sa.Connection) -> Finding:
    user, num_tables, unsafe = conn.execute(sa.text(ROLES), {"roles": [PLATFORM, OPERATOR, TENANT]}).one()
    if unsafe:
        fix = " ".join(f"ALTER ROLE {role} NOSUPERUSER NOBYPASSRLS;" for role in unsafe)
        return problem(f"row-level security does not hold for {', '.join(unsafe)}: superuser, BYPASSRLS, or owner of tables", fix)
    if not num_tables:
        return problem("no table has row-level security", upgrade())
    return ok(f"{num_tables} tables have row-level security, which holds for {user} and the other logins")


def store(site: Site) -> Iterator[Finding]:
    objects = open_platform(site.settings).objects
    probe(objects)
    yield ok(f"{site.settings.object_store} stores, lists and deletes an object and refuses bytes that do not match their checksum")
    key = f"{PREFIX}/{uuid.uuid4().hex}"
    (grant,) = objects.begin_upload(key, [hashlib.sha256(PROBE).hexdigest()]).parts
    if grant.url.startswith("file:"):
        yield skipped("conditional writes and the store's clock: it is a directory")
        return
    with httpx.Client(timeout=readiness.TIMEOUT_S, trust_env=False) as client, ExitStack() as at_the_end:
        at_the_end.callback(objects.delete, key)
        asked = site.clock()
        first, second = (client.put(grant.url, content=PROBE, headers={**grant.headers, "if-none-match": "*"}) for _ in range(2))
        answered = site.clock()
    if (first.is_success, second.status_code) == (True, httpx.codes.PRECONDITION_FAILED):
        yield ok("a second conditional write of an object is refused")
    else:
        text = (
            f"conditional writes of an object (If-None-Match: *) are answered with {first.status_code}, {second.status_code}, not 200, 412"
        )
        yield warning(text, "set FT_OBJECT_STORE to a store with conditional writes, such as AWS S3")
    yield clock("the object store", *date_header(second.headers["date"]), asked=asked, answered=answered)


def api(site: Site) -> Iterator[Finding]:
    url = f"{site.settings.internal_url}/readyz"
    found = readiness.http_ok(url)(0.0)
    yield ok(f"{url} answers") if found.ready else problem(f"{url}: {_why(found, 'no answer')}", restart("api"))


def dagster(site: Site) -> Iterator[Finding]:
    url = os.environ.get("FT_DAGSTER_URL") or f"http://127.0.0.1:{site.settings.dagster_port}"
    if on_kubernetes() and not site.settings.dagster_token:
        yield skipped(f"this process has no token of Dagster (FT_DAGSTER_TOKEN); run {elsewhere()}")
        return
    try:
        data = readiness.dagster_state(url, token=lambda: dagster_token(site.settings))
    except urllib.error.HTTPError as error:
        with closing(error):
            yield problem(f"{url} refuses the platform's token: {error.code}", "set FT_DAGSTER_TOKEN to the webserver's")
        return
    except (OSError, ValueError) as error:
        yield problem(f"{url} does not answer: {error}", restart("dagster"))
        return
    yield ok(f"{url} answers")
    for what, state, service in (
        ("code location", readiness.code_state(data), "code-location"),
        ("daemons", readiness.daemon_state(data, 0.0), "daemon"),
    ):
        yield ok(f"{what} up") if state.ready else problem(_why(state, f"{what} down"), restart(service))


def _why(found: Readiness, otherwise: str) -> str:
    return otherwise if found.detail == "starting" else " ".join(found.detail.split())


def serving(site: Site) -> Iterator[Finding]:
    settings = site.settings
    urls = own_servers.urls(open_platform(settings))
    if not any(urls):
        yield skipped("no inference server is configured (FT_INFERENCE_URLS)")
        return
    with closing(HttpFleet(urls, token=inference_token(settings), volume=adapters_volume(settings))) as fleet:
        for replica in fleet.replicas():
            if not replica.ready:
                yield problem(replica.error or f"{replica.url} serves no base model", f"curl --include {replica.url}/health")
            elif not fleet.loads_adapters(replica.url):
                fix = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (deploy/vllm/README.md)"
                yield problem(f"{replica.url} neither loads adapters nor looks them up", fix)
            elif replica.base_digest is None:
                fix = f"start it with a second --served-model-name: {replica.base}@sha256:<digest from ft admin models show {replica.base}>"
                yield warning(f"{replica.url} does not announce the digest of its base {replica.base}", fix)
            else:
                yield ok(f"{replica.url} serves {replica.base} with {len(replica.adapters)} adapters")


CHECKS: dict[str, Check] = {"database": database, "object store": store, "API": api, "Dagster": dagster, "serving": serving}
