"""The platform's services on one machine, as a list for the supervisor."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from control_plane.platform.settings import Settings
from core.errors import InvalidRequest
from core.processes.forked_process import Order
from core.telemetry import provenance
from deploy.local.readiness import (
    code_loaded,
    daemons_alive,
    every,
    file_touched,
    file_written,
    grpc_serving,
    http_ok,
    postgres_answers,
)
from deploy.local.supervisor.service_spec import Limits, Service
from resources.atomic_write import write_atomically
from resources.dagster import forked_services, run_records

POSTGRES, MIGRATE, DAGSTER, API, INFERENCE, WORKER = "postgres", "migrate", "dagster", "api", "inference", "worker"
CODE, DAEMON, RUNS = "code-location", "daemon", "runs"
DEMO_MODEL = "demo-llama-3m"

QUIET: Mapping[str, str] = {
    "DAGSTER_DISABLE_TELEMETRY": "yes",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_ARENA_MAX": "2",
}
"""Disables telemetry and Hub access and makes logs line-buffered. Waiting OpenMP threads sleep: spinning starves the other services of the
machine. Threads share two heaps: with one each, freed memory stays with the process (mallopt(3))."""

DATABASES = ("FT_DATABASE_URL", "FT_OWNER_DATABASE_URL", "FT_DAGSTER_DATABASE_URL", "DAGSTER_POSTGRES_URL")
"""Variables with passwords: a service gets those it needs (:func:`database_env`); the others are empty."""

PLATFORM = frozenset({API, WORKER, DAEMON, CODE, RUNS})
"""Services that run the platform's own code on jobs, datasets and models; Dagster starts runs from `CODE` where there is no `RUNS`."""
SECRETS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("FT_SMTP_URL", "FT_MLFLOW_URI"), PLATFORM),
    **dict.fromkeys(("FT_JUDGE_API_KEY", "FT_SAFETY_API_KEY", "FT_MODERATION_API_KEY"), PLATFORM - {API, DAEMON}),
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), PLATFORM | {DAGSTER}),  # output of steps
    **dict.fromkeys(("FT_OIDC_CLIENT_SECRET", "FT_METRICS_TOKEN"), frozenset({API})),
    **dict.fromkeys(("FT_HUB_TOKEN", "FT_API_KEY", "HF_TOKEN", "WANDB_API_KEY"), frozenset()),  # of commands
    "FT_INFERENCE_TOKEN": PLATFORM | {INFERENCE},
    "FT_DAGSTER_TOKEN": frozenset({DAGSTER, DAEMON}),
    "FT_PROMETHEUS_URL": frozenset({API, WORKER}),
    "FT_SIGNING_KEY_FILE": frozenset({WORKER}),
}
"""Further variables with secrets, and the services that read them: in all others they are empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Databases:
    url: str
    dagster_url: str


def project_root() -> Path:
    """Return the directory with ``workspace.yaml`` and ``dagster.yaml``: next to the packages, else the working directory."""
    beside = Path(__file__).resolve().parents[2]
    for root in (beside, Path.cwd()):
        if (root / "workspace.yaml").exists():
            return root
    raise InvalidRequest(
        f"workspace.yaml is neither in {beside} nor in {Path.cwd()}; run `ft` in a checkout of the project", code="no_workspace"
    )


def normalised(settings: Settings) -> Settings:
    """Return `settings` without URLs of the embedded databases, which ``ft env`` may have set in this shell: the stack owns those."""
    own = f"?host={settings.postgres_dir}"
    return dataclasses.replace(
        settings,
        database_url="" if settings.database_url.endswith(own) else settings.database_url,
        dagster_database_url="" if settings.dagster_database_url.endswith(own) else settings.dagster_database_url,
    )


def dagster_home(settings: Settings) -> Path:
    return settings.home / "dagster"


def prepare_home(settings: Settings) -> None:
    """Create the home's directories and put the project's ``dagster.yaml`` where Dagster looks for it. Idempotent."""
    from control_plane.capacity import configured_pools  # SQLAlchemy, as in `databases`
    from resources.database.engine import check_owner_password

    check_owner_password(settings)
    configured_pools.configured(settings, datetime.now(UTC))  # reports errors in the pools before anything starts
    provenance.commit(), provenance.lock_sha256()  # without them, every job would fail to record its lineage
    home = dagster_home(settings)
    home.mkdir(parents=True, exist_ok=True)
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(home / "dagster.yaml", (project_root() / "dagster.yaml").read_text())
    _prepare_code_location(settings)


def workspace_file(settings: Settings) -> Path:
    """Return the file that names the code location's socket to Dagster's webserver and daemon."""
    return dagster_home(settings) / "workspace.yaml"


def _prepare_code_location(settings: Settings) -> None:
    socket = code_socket(settings)
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_records.check_owned(settings, socket)
    server = {"socket": str(socket), "host": "localhost", "location_name": _code_location()["location_name"]}
    write_atomically(workspace_file(settings), json.dumps({"load_from": [{"grpc_server": server}]}, indent=2) + "\n")


def code_socket(settings: Settings) -> Path:
    return run_records.socket_path(settings, "code")


def _code_location() -> dict[str, str]:
    """Return module and name of the code location in ``workspace.yaml``."""
    import yaml

    (entry,) = yaml.safe_load((project_root() / "workspace.yaml").read_text())["load_from"]
    return dict(entry["python_module"])


def databases(settings: Settings) -> Databases:
    """Return the URLs of both databases; those of the embedded ones may be known only while the server runs."""
    from resources.database.engine import control_plane_url, dagster_url  # SQLAlchemy takes 0.3 s to import, too long for `ft --help`

    return Databases(url=control_plane_url(settings), dagster_url=dagster_url(settings))


def shown_database(settings: Settings) -> str:
    """Return the control plane's database URL for files and reports: an external one without its password."""
    from resources.database.engine import without_password

    url = databases(settings).url
    return url if settings.embedded_database else without_password(url)


def database_env(settings: Settings) -> dict[str, str]:
    found = databases(settings)
    return {"FT_DATABASE_URL": found.url, "FT_DAGSTER_DATABASE_URL": found.dagster_url, "DAGSTER_POSTGRES_URL": found.dagster_url}


def owner_env(settings: Settings) -> dict[str, str]:
    """Return :func:`database_env` with the URL of the schema's owner, only for the migrations."""
    from resources.database.engine import owner_url

    given = {"FT_DAGSTER_DATABASE_URL": settings.dagster_database_url}  # empty: the migrations prepare the one on our server
    return {**database_env(settings), **given, "FT_OWNER_DATABASE_URL": owner_url(settings)}


def child_env(settings: Settings) -> dict[str, str]:
    """Return the variables of every process of the stack, except those of the databases."""
    home = settings.home
    key_files = {
        "FT_SECRETS_KEY_FILE": (settings.secrets_key_file, "secrets.key"),
        "FT_SIGNING_KEY_FILE": (settings.signing_key_file, "signing.key"),
    }
    return {
        **QUIET,
        "FT_HOME": str(home),
        "FT_OBJECT_STORE": settings.object_store,
        "FT_API_HOST": settings.api_host,
        "FT_API_PORT": str(settings.api_port),
        "FT_DAGSTER_PORT": str(settings.dagster_port),
        "FT_INFERENCE_PORT": str(settings.inference_port),
        "FT_INFERENCE_URLS": ",".join(settings.inference_urls),
        "FT_LOCAL_GPUS": str(settings.local_gpus),
        "FT_BASE_MODELS": ":".join(str(p.absolute()) for p in settings.base_models),
        "DAGSTER_HOME": str(dagster_home(settings)),
        **({"FT_POOLS": str(settings.pools_file)} if settings.pools_file else {}),
        **{variable: str(file) for variable, (file, default) in key_files.items() if file != home / default},
    }


def process_env(settings: Settings) -> dict[str, str]:
    """Return the current environment updated with :func:`child_env`, without secrets, with this Python's scripts first in PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, **child_env(settings), **dict.fromkeys((*DATABASES, *SECRETS), "")}


def _with_secrets(settings: Settings, service: Service) -> Service:
    """Give `service` the secrets that it reads."""
    given = {**os.environ, **child_env(settings)}
    read = {name: given[name] for name, readers in SECRETS.items() if service.name in readers and name in given}
    return dataclasses.replace(service, env=lambda: {**read, **service.env()})


def services(settings: Settings) -> list[Service]:
    """Return the services in start order; the database is first, so it ends last."""
    first = [_postgres(settings)] if settings.embedded_database else []
    after = (POSTGRES,) if settings.embedded_database else ()
    local = [_inference(settings)] if settings.embedded_inference else []
    needs = after if settings.dagster_database_url else (MIGRATE,)  # which prepares Dagster's role and database
    dagster = [_code_location_server(settings, needs), _webserver(settings, needs), _daemon(settings)]
    forked = [_forked(settings, service) for service in (*dagster, _worker(settings), _api(settings))]
    return [_with_secrets(settings, service) for service in (*first, _migrate(settings, after), *local, _runs(settings), *forked)]


def limits(settings: Settings) -> Limits:
    return Limits(
        start_timeout_s=settings.start_timeout_s, start_attempts=settings.start_attempts, hung_after_s=settings.hung_after_s,
        max_restart_pause_s=settings.max_restart_pause_s,
    )  # fmt: skip


def _postgres(settings: Settings) -> Service:
    from deploy.local.postgres import ready_file

    return Service(
        name=POSTGRES, argv=(sys.executable, "-m", "deploy.local.postgres"), probe=file_written(ready_file(settings)),
        liveness=every(file_touched(ready_file(settings)), postgres_answers(settings.postgres_dir)),
        url=lambda: databases(settings).url, grace_s=20.0, full_grace=True, last=True,
    )  # fmt: skip


def _migrate(settings: Settings, after: tuple[str, ...]) -> Service:
    return Service(
        name=MIGRATE,
        argv=(sys.executable, "-m", "deploy.local.database_setup"),
        after=after,
        env=lambda: owner_env(settings),
        full_grace=True,
    )


def _dagster_url(settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.dagster_port}"


def _log_format(settings: Settings) -> tuple[str, ...]:
    return ("--log-format", "json") if settings.log_format == "json" else ()


def _code_location_server(settings: Settings, needs: tuple[str, ...]) -> Service:
    location, socket = _code_location(), code_socket(settings)
    return Service(
        name=CODE,
        argv=(
            sys.executable, "-m", "dagster", "api", "grpc", "--socket", str(socket), "--location-name", location["location_name"],
            "--module-name", location["module_name"], "--use-python-environment-entry-point", *_log_format(settings),
        ),
        probe=grpc_serving(f"unix:{socket}", "DagsterApi"), after=needs, env=lambda: database_env(settings), required=False,
        stop_signal=signal.SIGINT,
    )  # fmt: skip


def _dagster_token(settings: Settings) -> Callable[[], str]:
    from control_plane.platform.secrets import dagster_token  # cryptography is slow to import

    return lambda: dagster_token(settings)


def _webserver(settings: Settings, needs: tuple[str, ...]) -> Service:
    url, token = _dagster_url(settings), _dagster_token(settings)
    return Service(
        name=DAGSTER,
        argv=(sys.executable, "-m", "deploy.local.dagster_web", str(workspace_file(settings))),
        probe=code_loaded(url, token=token), liveness=http_ok(f"{url}/server_info", token=token), after=(*needs, CODE),
        env=lambda: database_env(settings), url=lambda: url, port=settings.dagster_port, port_variable="FT_DAGSTER_PORT", required=False,
        stop_signal=signal.SIGINT,
    )  # fmt: skip


def _daemon(settings: Settings) -> Service:
    beat = settings.home / "daemon.beat"
    return Service(
        name=DAEMON,
        argv=(
            sys.executable, "-m", "deploy.local.supervisor.file_heartbeat", str(beat), "sensors.daemon",
            "run", "-w", str(workspace_file(settings)), *_log_format(settings),
        ),
        probe=daemons_alive(_dagster_url(settings), token=_dagster_token(settings)),
        liveness=file_touched(beat), after=(CODE,), env=lambda: database_env(settings), required=False,
        stop_signal=signal.SIGINT, grace_s=15.0,
    )  # fmt: skip


def _forked(settings: Settings, service: Service) -> Service:
    """Have the run server fork `service`, which then takes a third of the memory and no time to import."""

    def fork(argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: int) -> int | None:
        return forked_services.request(settings, Order(name=service.name, argv=argv[2:], env=env, cwd=str(cwd)), output)

    return dataclasses.replace(service, forked_by=RUNS, fork=fork)


def _runs(settings: Settings) -> Service:
    """Without it, Dagster starts runs itself, and services are started by fresh interpreters. It imports while the database starts."""
    from resources.dagster.run_records import ready_file

    return Service(
        name=RUNS, argv=(sys.executable, "-m", "resources.dagster.run_server"), probe=file_touched(ready_file(settings)),
        env=lambda: database_env(settings), expendable=True,
    )  # fmt: skip


def _worker(settings: Settings) -> Service:
    return Service(
        name=WORKER, argv=(sys.executable, "-m", "control_plane.worker"), probe=file_touched(settings.home / "worker.alive"),
        after=(MIGRATE,), env=lambda: database_env(settings), last=True,
    )  # fmt: skip


def _api(settings: Settings) -> Service:
    host = "127.0.0.1" if settings.api_host == "0.0.0.0" else settings.api_host
    url = f"http://{host}:{settings.api_port}"
    return Service(
        name=API, argv=(sys.executable, "-m", "control_plane.api"), probe=http_ok(f"{url}/healthz"),
        liveness=http_ok(f"{url}/livez"), after=(MIGRATE,), env=lambda: database_env(settings),
        url=lambda: url, host=settings.api_host, port=settings.api_port, port_variable="FT_API_PORT", last=True, grace_s=25.0,
    )  # fmt: skip


def demo_model_dir(settings: Settings) -> Path:
    """Return the directory of the demo model's current files; an update takes effect at the next start."""
    from core.base_models import Catalogue, catalogue_file  # YAML and hashing are slow to import

    directory = Catalogue.load(settings.base_models, operator=catalogue_file(settings.models_dir)).card(DEMO_MODEL).directory
    if directory is None:
        raise InvalidRequest(f"the catalogue has no files for {DEMO_MODEL}, which the local server serves; add a path to its entry")
    return directory


def _inference(settings: Settings) -> Service:
    from control_plane.platform.secrets import inference_token  # cryptography is slow to import

    url = f"http://127.0.0.1:{settings.inference_port}"
    model = demo_model_dir(settings)
    return Service(
        name=INFERENCE,
        argv=(
            sys.executable, "-m", "resources.inference", "--model-dir", str(model), "--served-name", DEMO_MODEL,
            "--host", "127.0.0.1", "--port", str(settings.inference_port), "--max-lora-rank", str(settings.max_lora_rank),
        ),
        probe=http_ok(f"{url}/health", token=lambda: inference_token(settings)), url=lambda: url,
        port=settings.inference_port, port_variable="FT_INFERENCE_PORT", required=False,
    )  # fmt: skip


def stop_database(settings: Settings) -> bool:
    """Stop an embedded server that outlived its supervisor; returns whether one ran."""
    if not settings.embedded_database:
        return False
    from deploy.local.postgres import stop_running

    return stop_running(settings)
