"""Where things are: one frozen object read from the environment; every default is the embedded, one-machine platform."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    home: Path
    """``FT_HOME``: state of the embedded platform (database, objects, workloads, logs). Default ``./.ft``."""
    database_url: str
    """``FT_DATABASE_URL``: SQLAlchemy URL of the control plane's PostgreSQL. Empty: the embedded one under `home`.

    Processes log in with its password as ``ft_platform``, ``ft_operator`` and ``ft_tenant``, whatever user it names.
    """
    owner_database_url: str
    """``FT_OWNER_DATABASE_URL``: the same database as the role that owns its schema, for migrations. Empty: `database_url` as
    given, which must then have no password: the login roles must not know the owner's."""
    dagster_database_url: str
    """``FT_DAGSTER_DATABASE_URL``: same for Dagster's storage. Empty: database ``dagster`` beside the control plane's."""
    object_store: str
    """``FT_OBJECT_STORE``: ``file:///dir`` or ``s3://bucket/prefix``. Default ``file://<home>/objects``."""
    api_host: str
    api_port: int
    """``FT_API_HOST``, ``FT_API_PORT``: default 127.0.0.1:8000."""
    dagster_port: int
    """``FT_DAGSTER_PORT``: default 3000."""
    dagster_hosts: tuple[str, ...]
    """``FT_DAGSTER_HOSTS``: hosts (``name`` or ``name:port``, comma-separated) under which browsers reach Dagster's webserver, beside the
    loopback names; requests to others, and from pages of others, are refused. Default: none."""
    dagster_token: str = field(repr=False)
    """``FT_DAGSTER_TOKEN``: bearer token of the platform's own calls of Dagster's webserver, the same on both sides. Set it where the
    webserver (``FT_DAGSTER_URL``) runs with another home. Default: a token made for this installation, ``<home>/dagster.token``."""
    inference_port: int
    """``FT_INFERENCE_PORT``: default 8001."""
    inference_urls: tuple[str, ...]
    """``FT_INFERENCE_URLS``: replicas, comma-separated. Default the local server."""
    served_adapters_dir: PurePosixPath | None
    """``FT_SERVED_ADAPTERS_DIR``: where the inference servers see ``<home>/work/adapters``, which is one volume for both. Default: at
    the same path."""
    inference_token: str = field(repr=False)
    """``FT_INFERENCE_TOKEN``: sent as bearer token to every inference server, and required by the embedded one. Default: a token made for
    this installation, ``<home>/inference.token``."""
    drain_s: float
    """``FT_DRAIN_S``: seconds that a withdrawn adapter stays loaded, for requests that were on their way. Default 5."""
    base_models: tuple[Path, ...]
    """``FT_BASE_MODELS``: further catalogue files (YAML), separated by ``:``."""
    cluster_file: Path | None
    """``FT_CLUSTER``: YAML with the fields of ``ft_assets.adapters.cluster.ClusterSettings``, for manifests of model servers. Default:
    none, and none are rendered."""
    local_gpus: int
    """``FT_LOCAL_GPUS``: slots of the embedded pool; each runs one rank of a job. More slots than GPUs share them. Default 1."""
    premium_gpus: int
    """``FT_PREMIUM_GPUS``: slots of the embedded pool that only premium jobs take, fewer than ``FT_LOCAL_GPUS``. Default 0."""
    pools_file: Path | None
    """``FT_POOLS``: YAML with the pools of this installation (``deploy/pools.yaml`` is one), in place of the embedded one and of
    ``FT_LOCAL_GPUS`` and ``FT_PREMIUM_GPUS``. Default: none."""
    prepare_runs: int
    """``FT_PREPARE_RUNS``: preparations that run at once, half of them of one tenant. Default: from the number of GPUs, at least 4; see
    ``control_plane.queue.launches``."""
    evaluate_runs: int
    """``FT_EVALUATE_RUNS``: the same for evaluations. Default: from the number of GPUs, at least 2."""
    heartbeat_timeout_s: float
    """``FT_HEARTBEAT_TIMEOUT_S``: seconds without a heartbeat after which a training process is stopped and resumed. It beats every 2 s, on
    an overloaded machine late; an alert is raised at 30 s. Default 40. Raise it where the first import of torch takes longer."""
    heartbeat_grace_s: float
    """``FT_HEARTBEAT_GRACE_S``: seconds between SIGTERM and SIGKILL for such a process. Default 15: it has ended 55 s after its last
    heartbeat, within the 60 s that the platform promises."""
    hub_endpoint: str
    """``FT_HUB_ENDPOINT``: address of the Hub that ``hf://`` ids are fetched from. Default: none, and such ids are refused."""
    safety_file: Path | None
    """``FT_SAFETY_EXAMPLES``: JSONL of conversations that the hyperparameter ``safety_share`` mixes in. Default: the set that ships."""
    hub_token: str = field(repr=False)
    """``FT_HUB_TOKEN``: for datasets that are not public, of ``ft`` on this machine alone: an import of a tenant brings its own.
    Default: none."""
    validation_memory_bytes: int
    """``FT_VALIDATION_MEMORY_GIB``: what the validation of one file may take. Default 3: half as much again as the 2 GiB in which
    10M rows are validated."""
    toxicity_classifier: str
    """``FT_TOXICITY_CLASSIFIER``: ``builtin``, ``http(s)://host/v1/moderations[#model]`` or ``package.module:factory``."""
    safety_classifier: str
    """``FT_SAFETY_CLASSIFIER``: says which answers to the safety set refuse: ``builtin`` (a rule), ``http(s)://host/v1#model`` (a guard
    model that answers safe or unsafe; key: ``FT_SAFETY_API_KEY``), ``package.module:factory``, or ``off`` (empty here): nobody is asked."""
    judge_url: str
    """``FT_JUDGE_URL``: ``http(s)://host/v1`` of the model that compares answers in pairs (key: ``FT_JUDGE_API_KEY``, read where it is used
    and written nowhere). Default: none, and nothing is judged."""
    judge_model: str
    """``FT_JUDGE_MODEL``: what the judge is called there."""
    judge_family: str
    """``FT_JUDGE_FAMILY``: its family, where its name does not tell: a judge of the compared models' family is warned about."""
    eval_task_dirs: tuple[Path, ...]
    """``FT_EVAL_TASKS``: directories of further capability suites in lm-evaluation-harness's format, separated by ``:``. Python that they
    name runs in the evaluation process: they are the operator's to trust."""
    eval_data_dir: Path | None
    """``FT_EVAL_DATA``: directory with the rows of MMLU, HellaSwag and ARC (docs/evaluations.md says which files). Default: none."""
    eval_suites: tuple[str, ...]
    """``FT_EVAL_SUITES``: capability suites of jobs that name none, comma-separated. Default: none."""
    mlflow_uri: str
    """``FT_MLFLOW_URI``: tracking store that every attempt is copied to: a database (``postgresql+psycopg2://...``), a server
    (``http://...``) or ``off``. Default ``sqlite:///<home>/mlflow.db``; empty here: off."""
    cold_dir: Path | None
    """``FT_COLD_DIR``: where a local object store moves datasets that nobody uses, e.g. a slower disk. Default: none, they stay."""
    cold_storage_class: str
    """``FT_COLD_STORAGE_CLASS``: the same in a bucket; must be readable at once. Default ``STANDARD_IA``; empty (``off``): they stay."""
    cold_after_days: int
    """``FT_COLD_AFTER_DAYS``: without a job. Default 90."""
    partition_days: int
    """``FT_PARTITION_DAYS``: after its end a job's partition key stays in Dagster's lists for so long. Default 30."""
    run_days: int
    """``FT_RUN_DAYS``: days after its end at which a Dagster run is deleted, with its events and output. Default 90."""
    prices_file: Path | None
    """``FT_PRICES``: YAML in the form of ``control_plane/billing/prices.yaml``, with this platform's price lists. Default: that file."""
    metrics_token: str = field(repr=False)
    """``FT_METRICS_TOKEN``: what a scraper of ``GET /metrics`` sends as its bearer token. Default: none, and only this machine is
    answered."""
    log_format: str
    """``FT_LOG_FORMAT``: ``text`` for people, or ``json``: a line an event, for what collects logs. Default ``text``."""
    log_level: str
    """``FT_LOG_LEVEL``: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``. Default ``INFO``."""
    otlp_endpoint: str
    """``FT_OTLP_ENDPOINT``: OTLP/HTTP collector of spans, e.g. ``http://collector:4318`` (what it wants to see beside them:
    ``OTEL_EXPORTER_OTLP_HEADERS``). Default: none, and nothing is traced."""
    trace_share: float
    """``FT_TRACE_SHARE``: of the requests that are in no trace yet, the share that begins one, 0 to 1. Default 1."""
    start_timeout_s: float
    """``FT_START_TIMEOUT_S``: seconds that a service of ``ft up`` may take to become ready, before it is started again. Default 180."""
    start_attempts: int
    """``FT_START_ATTEMPTS``: failed starts after which ``ft up`` gives up on a service that was never ready. Default 3."""
    hung_after_s: float
    """``FT_HUNG_AFTER_S``: seconds without an answer to health probes after which ``ft up`` replaces a service. Default 20."""
    max_restart_pause_s: float
    """``FT_MAX_RESTART_PAUSE_S``: longest pause of ``ft up`` between two starts of a service that keeps failing. Default 60."""
    operator_contact: str
    """``FT_OPERATOR_CONTACT``: whom tenants are told to ask, e.g. an e-mail address. Default ``your operator``."""

    webhook_allow: str
    """``FT_WEBHOOK_ALLOW``: networks (CIDRs, comma-separated) whose addresses webhooks may go to although they are not public, by http
    too: receivers in the cluster. Every tenant's endpoints reach them. Default: none."""
    smtp_url: str = field(repr=False)
    """``FT_SMTP_URL``: ``smtp://user:password@host:587`` (STARTTLS; without it only where there is no password) or ``smtps://...:465``.
    Default: none, and no e-mail is sent."""
    smtp_from: str
    """``FT_SMTP_FROM``: sender of e-mails. Default ``ft-platform@`` and the host of `public_url`."""
    secrets_key_file: Path
    """``FT_SECRETS_KEY_FILE``: keys that encrypt secrets in the database, one a line, the newest first (mode 0600). Every process of the
    control plane needs it. Default ``<home>/secrets.key``, made at the first use."""
    public_url: str
    """``FT_PUBLIC_URL``: where tenants reach the API, for links in e-mails. Default ``http://<api_host>:<api_port>``."""

    @property
    def work_dir(self) -> Path:
        """Node-local scratch: workloads and their checkpoints before upload."""
        return self.home / "work"

    @property
    def adapters_dir(self) -> Path:
        """The directories of served adapters and their index; servers read it, and it may be a volume of its own."""
        return self.work_dir / "adapters"

    @property
    def models_dir(self) -> Path:
        """The operator's catalogue of base models, and what was fetched for it."""
        return self.home / "models"

    @property
    def log_dir(self) -> Path:
        return self.home / "logs"

    @property
    def endpoints_file(self) -> Path:
        return self.home / "endpoints.json"

    @property
    def embedded_database(self) -> bool:
        return not self.database_url

    @property
    def postgres_dir(self) -> Path:
        return self.home / "postgres"


def load(env: Mapping[str, str] | None = None) -> Settings:
    """Settings from `env` (default: the process environment)."""
    e = os.environ if env is None else env
    home = Path(e.get("FT_HOME") or ".ft").absolute()
    inference_port = int(e.get("FT_INFERENCE_PORT") or 8001)
    api = f"http://{e.get('FT_API_HOST') or '127.0.0.1'}:{e.get('FT_API_PORT') or 8000}"
    public_url = (e.get("FT_PUBLIC_URL") or api).rstrip("/")
    urls = e.get("FT_INFERENCE_URLS") or f"http://127.0.0.1:{inference_port}"
    return Settings(
        home=home,
        database_url=e.get("FT_DATABASE_URL") or "",
        owner_database_url=e.get("FT_OWNER_DATABASE_URL") or "",
        dagster_database_url=e.get("FT_DAGSTER_DATABASE_URL") or "",
        object_store=e.get("FT_OBJECT_STORE") or f"file://{home}/objects",
        api_host=e.get("FT_API_HOST") or "127.0.0.1",
        api_port=int(e.get("FT_API_PORT") or 8000),
        dagster_port=int(e.get("FT_DAGSTER_PORT") or 3000),
        dagster_hosts=tuple(h.strip().lower() for h in (e.get("FT_DAGSTER_HOSTS") or "").split(",") if h.strip()),
        dagster_token=e.get("FT_DAGSTER_TOKEN") or "",
        inference_port=inference_port,
        inference_urls=tuple(u.strip().rstrip("/") for u in urls.split(",")),
        served_adapters_dir=_absolute(e.get("FT_SERVED_ADAPTERS_DIR") or ""),
        inference_token=e.get("FT_INFERENCE_TOKEN") or "",
        drain_s=float(e.get("FT_DRAIN_S") or 5),
        base_models=tuple(Path(p) for p in (e.get("FT_BASE_MODELS") or "").split(":") if p),
        cluster_file=Path(e["FT_CLUSTER"]) if e.get("FT_CLUSTER") else None,
        local_gpus=int(e.get("FT_LOCAL_GPUS") or 1),
        premium_gpus=int(e.get("FT_PREMIUM_GPUS") or 0),
        pools_file=Path(e["FT_POOLS"]).absolute() if e.get("FT_POOLS") else None,
        prepare_runs=_runs(e, "FT_PREPARE_RUNS"),
        evaluate_runs=_runs(e, "FT_EVALUATE_RUNS"),
        heartbeat_timeout_s=_seconds(e, "FT_HEARTBEAT_TIMEOUT_S", 40.0),
        heartbeat_grace_s=_seconds(e, "FT_HEARTBEAT_GRACE_S", 15.0),
        hub_endpoint=(e.get("FT_HUB_ENDPOINT") or "").rstrip("/"),
        toxicity_classifier=e.get("FT_TOXICITY_CLASSIFIER") or "builtin",
        safety_file=Path(e["FT_SAFETY_EXAMPLES"]) if e.get("FT_SAFETY_EXAMPLES") else None,
        hub_token=e.get("FT_HUB_TOKEN") or "",
        safety_classifier=_unless_off(e.get("FT_SAFETY_CLASSIFIER") or "builtin"),
        judge_url=(e.get("FT_JUDGE_URL") or "").rstrip("/"),
        judge_model=e.get("FT_JUDGE_MODEL") or "",
        judge_family=(e.get("FT_JUDGE_FAMILY") or "").casefold(),
        eval_task_dirs=tuple(Path(p).absolute() for p in (e.get("FT_EVAL_TASKS") or "").split(":") if p),
        eval_data_dir=Path(e["FT_EVAL_DATA"]).absolute() if e.get("FT_EVAL_DATA") else None,
        eval_suites=tuple(name for part in (e.get("FT_EVAL_SUITES") or "").split(",") if (name := part.strip())),
        mlflow_uri=_mlflow_uri(e.get("FT_MLFLOW_URI") or "", home),
        cold_dir=Path(e["FT_COLD_DIR"]).absolute() if e.get("FT_COLD_DIR") else None,
        cold_storage_class=_unless_off(e.get("FT_COLD_STORAGE_CLASS") or "STANDARD_IA"),
        cold_after_days=int(e.get("FT_COLD_AFTER_DAYS") or 90),
        partition_days=int(e.get("FT_PARTITION_DAYS") or 30),
        run_days=int(_at_least("FT_RUN_DAYS", e.get("FT_RUN_DAYS") or "90", 1)),
        prices_file=Path(e["FT_PRICES"]).absolute() if e.get("FT_PRICES") else None,
        metrics_token=e.get("FT_METRICS_TOKEN") or "",
        webhook_allow=e.get("FT_WEBHOOK_ALLOW") or "",
        smtp_url=e.get("FT_SMTP_URL") or "",
        smtp_from=e.get("FT_SMTP_FROM") or f"ft-platform@{urlsplit(public_url).hostname or 'localhost'}",
        secrets_key_file=Path(e["FT_SECRETS_KEY_FILE"]).absolute() if e.get("FT_SECRETS_KEY_FILE") else home / "secrets.key",
        public_url=public_url,
        log_format=_log_format(e.get("FT_LOG_FORMAT") or "text"),
        log_level=(e.get("FT_LOG_LEVEL") or "INFO").upper(),
        otlp_endpoint=(e.get("FT_OTLP_ENDPOINT") or "").rstrip("/"),
        trace_share=_share(e.get("FT_TRACE_SHARE") or "1"),
        start_timeout_s=_at_least("FT_START_TIMEOUT_S", e.get("FT_START_TIMEOUT_S") or "180", 1.0),
        start_attempts=int(_at_least("FT_START_ATTEMPTS", e.get("FT_START_ATTEMPTS") or "3", 1)),
        hung_after_s=_at_least("FT_HUNG_AFTER_S", e.get("FT_HUNG_AFTER_S") or "20", 6.0),  # a probe alone may take 5 s
        max_restart_pause_s=_at_least("FT_MAX_RESTART_PAUSE_S", e.get("FT_MAX_RESTART_PAUSE_S") or "60", 1.0),
        operator_contact=e.get("FT_OPERATOR_CONTACT") or "your operator",
        validation_memory_bytes=int(float(e.get("FT_VALIDATION_MEMORY_GIB") or 3) * (1 << 30)),
    )


def _log_format(requested: str) -> str:
    if requested not in ("text", "json"):
        raise ValueError(f"FT_LOG_FORMAT {requested!r} is not known; use text or json")
    return requested


def _share(requested: str) -> float:
    share = float(requested)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"FT_TRACE_SHARE {requested} is not a share; use a number from 0 to 1")
    return share


def _at_least(name: str, requested: str, least: float) -> float:
    value = float(requested)
    if value < least:
        raise ValueError(f"{name} {requested} is below {least:g}; use {least:g} or more")
    return value


def _runs(env: Mapping[str, str], name: str) -> int:
    if not env.get(name):
        return 0
    runs = int(env[name])
    if runs < 1:
        raise ValueError(f"{name} is {runs}; use 1 or more, or leave it out for the default")
    return runs


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    seconds = float(env.get(name) or default)
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"{name} is {env[name]}; use a number of seconds above 0")
    return seconds


def _unless_off(requested: str) -> str:
    return "" if requested == "off" else requested


def _absolute(requested: str) -> PurePosixPath | None:
    """A path of another machine: nothing of this one is added to it."""
    if requested and not requested.startswith("/"):
        raise ValueError(f"FT_SERVED_ADAPTERS_DIR {requested!r} is not absolute; give the path at which the inference servers mount it")
    return PurePosixPath(requested) if requested else None


def _mlflow_uri(requested: str, home: Path) -> str:
    return "" if requested == "off" else requested or f"sqlite:///{home}/mlflow.db"
