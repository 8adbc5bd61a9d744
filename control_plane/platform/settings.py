"""Where things are: one frozen object read from the environment; every default is the embedded, one-machine platform."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from core.base_models import ENGINE_RANKS, MAX_RANK
from core.layout import checked_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    home: Path
    """``FT_HOME``: state of the embedded platform (database, objects, workloads, logs). Default ``./.ft``."""
    database_url: str = ""
    """``FT_DATABASE_URL``: SQLAlchemy URL of the control plane's PostgreSQL. Empty: the embedded one under `home`.

    Processes log in with its password as ``ft_platform``, ``ft_operator`` and ``ft_tenant``, whatever user it names.
    """
    owner_database_url: str = ""
    """``FT_OWNER_DATABASE_URL``: the same database as the role that owns its schema, for migrations. Empty: `database_url` as
    given, which must then have no password: the login roles must not know the owner's."""
    dagster_database_url: str = ""
    """``FT_DAGSTER_DATABASE_URL``: same for Dagster's storage. Empty: database ``dagster`` beside the control plane's."""
    object_store: str = ""
    """``FT_OBJECT_STORE``: ``file:///dir`` or ``s3://bucket/prefix``. Default ``file://<home>/objects``."""
    tenant_key: str = ""
    """``FT_TENANT_KEY``: what encrypts new objects. In a bucket, the KMS key of a tenant, such as ``alias/ft-{tenant}``, which
    must exist; in a directory ``local``: a key per tenant beside the objects, encrypted with `secrets_key_file`. Default: nothing."""
    object_store_networks: tuple[str, ...] = ()
    """``FT_OBJECT_STORE_NETWORKS``: networks (CIDRs, comma-separated) of the object store's addresses. On a cluster, workloads connect to
    these, the API and DNS only. Default: none."""
    workload_accounts: tuple[str, ...] = ()
    """``FT_WORKLOAD_ACCOUNTS``: service accounts (comma-separated) in the platform's namespace that start, watch or stop workloads on a
    cluster. In each tenant's namespace, each gets the ClusterRole of its own name. Default: none."""
    api_host: str = "127.0.0.1"
    api_port: int = 8000
    """``FT_API_HOST``, ``FT_API_PORT``: default 127.0.0.1:8000."""
    api_hosts: tuple[str, ...] = ()
    """``FT_API_HOSTS``: further names (comma-separated) under which the API is reached, beside the hosts of `public_url` and
    `internal_url`, loopback names and the address of the connection; ``*``: any. Requests under others are refused. Default: none."""
    dagster_port: int = 3000
    """``FT_DAGSTER_PORT``: default 3000."""
    dagster_hosts: tuple[str, ...] = ()
    """``FT_DAGSTER_HOSTS``: hosts (``name`` or ``name:port``, comma-separated) under which browsers reach Dagster's webserver, beside the
    loopback names; requests to others, and from pages of others, are refused. Default: none."""
    dagster_public_url: str = ""
    """``FT_DAGSTER_PUBLIC_URL``: where operators' browsers reach Dagster's webserver, for links of the console. Default: on one machine,
    its port beside the API's; elsewhere none, and there are no links."""
    dagster_token: str = field(default="", repr=False)
    """``FT_DAGSTER_TOKEN``: bearer token of the platform's own calls of Dagster's webserver, the same on both sides. Set it where the
    webserver (``FT_DAGSTER_URL``) runs with another home. Default: a token made for this installation, ``<home>/dagster.token``."""
    inference_port: int = 8001
    """``FT_INFERENCE_PORT``: default 8001."""
    inference_urls: tuple[str, ...] = ()
    """``FT_INFERENCE_URLS``: replicas, comma-separated. Default the local server."""
    served_adapters_dir: PurePosixPath | None = None
    """``FT_SERVED_ADAPTERS_DIR``: where the inference servers see ``<home>/work/adapters``, which is one volume for both. Default: at
    the same path."""
    inference_token: str = field(default="", repr=False)
    """``FT_INFERENCE_TOKEN``: sent as bearer token to every inference server, and required by the embedded one. Default: a token made for
    this installation, ``<home>/inference.token``."""
    max_lora_rank: int = MAX_RANK
    """``FT_MAX_LORA_RANK``: highest rank of an adapter that jobs train and servers load (their ``--max-lora-rank``): 8, 16, 32, 64, 128,
    256, 320 or 512. Servers keep memory for adapters of this rank. Default 128."""
    drain_s: float = 5.0
    """``FT_DRAIN_S``: seconds that a withdrawn adapter stays loaded, for requests that were on their way. Default 5."""
    base_models: tuple[Path, ...] = ()
    """``FT_BASE_MODELS``: further catalogue files (YAML), separated by ``:``."""
    cluster_file: Path | None = None
    """``FT_CLUSTER``: YAML with the fields of ``engine.adapters.cluster.ClusterSettings``, for manifests of model servers; on a
    cluster, the worker applies them. Default: none, and none are rendered."""
    local_gpus: int = 1
    """``FT_LOCAL_GPUS``: slots of the embedded pool; each runs one rank of a job. More slots than GPUs share them. Default 1."""
    premium_gpus: int = 0
    """``FT_PREMIUM_GPUS``: slots of the embedded pool that only premium jobs take, fewer than ``FT_LOCAL_GPUS``. Default 0."""
    pools_file: Path | None = None
    """``FT_POOLS``: YAML with the pools of this installation (``deploy/pools.yaml`` is one), in place of the embedded one and of
    ``FT_LOCAL_GPUS`` and ``FT_PREMIUM_GPUS``. Default: none."""
    prometheus_url: str = field(default="", repr=False)
    """``FT_PROMETHEUS_URL``: ``http://user:password@host:9090`` of a Prometheus server with the metrics of NVIDIA's DCGM exporter: nodes
    whose GPUs report hardware errors are drained. Default: none."""
    prepare_runs: int = 0
    """``FT_PREPARE_RUNS``: preparations that run at once, half of them of one tenant. Default: from the number of GPUs, at least 4; see
    ``control_plane.queue.launches``."""
    heartbeat_timeout_s: float = 40.0
    """``FT_HEARTBEAT_TIMEOUT_S``: seconds without a heartbeat after which a training process is stopped and resumed. It beats every 2 s, on
    an overloaded machine late; an alert is raised at 30 s. Default 40. Raise it where the first import of torch takes longer."""
    heartbeat_grace_s: float = 15.0
    """``FT_HEARTBEAT_GRACE_S``: seconds between SIGTERM and SIGKILL for such a process. Default 15: it has ended 55 s after its last
    heartbeat, within the 60 s that the platform promises."""
    hub_endpoint: str = ""
    """``FT_HUB_ENDPOINT``: address of the Hub that ``hf://`` ids are fetched from. Default: none, and such ids are refused."""
    safety_file: Path | None = None
    """``FT_SAFETY_EXAMPLES``: JSONL of conversations that the hyperparameter ``safety_share`` mixes in. Default: the set that ships."""
    hub_token: str = field(default="", repr=False)
    """``FT_HUB_TOKEN``: for datasets that are not public, of ``ft`` on this machine alone: an import of a tenant brings its own.
    Default: none."""
    validation_memory_bytes: int = 3 << 30
    """``FT_VALIDATION_MEMORY_GIB``: what the validation of one file may take. Default 3: half as much again as the 2 GiB in which
    10M rows are validated."""
    toxicity_classifier: str = "builtin"
    """``FT_TOXICITY_CLASSIFIER``: ``builtin``, ``http(s)://host/v1/moderations[#model]`` or ``package.module:factory``."""
    safety_classifier: str = "builtin"
    """``FT_SAFETY_CLASSIFIER``: says which answers to the safety set refuse: ``builtin`` (a rule), ``http(s)://host/v1#model`` (a guard
    model that answers safe or unsafe; key: ``FT_SAFETY_API_KEY``), ``llama-guard:http(s)://host/v1#model`` (any instruct model, with Llama
    Guard's prompt), ``package.module:factory``, or ``off`` (empty here): no classifier."""
    judge_url: str = ""
    """``FT_JUDGE_URL``: ``http(s)://host/v1`` of the model that compares answers in pairs (key: ``FT_JUDGE_API_KEY``, read where it is used
    and written nowhere). Default: none, and nothing is judged."""
    judge_model: str = ""
    """``FT_JUDGE_MODEL``: what the judge is called there."""
    judge_family: str = ""
    """``FT_JUDGE_FAMILY``: its family, where its name does not tell: a judge of the compared models' family is warned about."""
    eval_task_dirs: tuple[Path, ...] = ()
    """``FT_EVAL_TASKS``: directories of further capability suites in lm-evaluation-harness's format, separated by ``:``. Python that they
    name runs in the evaluation process: they are the operator's to trust."""
    eval_data_dir: Path | None = None
    """``FT_EVAL_DATA``: directory with the rows of public capability suites (docs/evaluations.md says which files). Default: none."""
    eval_suites: tuple[str, ...] = ()
    """``FT_EVAL_SUITES``: capability suites of jobs that name none, comma-separated. Default: none."""
    eval_vllm_python: str = ""
    """``FT_EVAL_VLLM_PYTHON``: Python of an environment with vLLM, at the same path on every node or in the image of workloads: it
    generates the answers of evaluations. Default: none, and transformers generates."""
    mlflow_uri: str = ""
    """``FT_MLFLOW_URI``: tracking store that every attempt is copied to: a database (``postgresql+psycopg2://...``), a server
    (``http://...``) or ``off``. Default ``sqlite:///<home>/mlflow.db``; empty here: off."""
    wandb_url: str = "https://api.wandb.ai"
    """``FT_WANDB_URL``: API of Weights & Biases, or of a server of one's own, to which the worker sends the metrics of jobs with that
    integration; ``off`` (empty here): the integration is refused."""
    cold_dir: Path | None = None
    """``FT_COLD_DIR``: where a local object store moves datasets that nobody uses, e.g. a slower disk. Default: none, they stay."""
    cold_storage_class: str = "STANDARD_IA"
    """``FT_COLD_STORAGE_CLASS``: the same in a bucket; must be readable at once. Default ``STANDARD_IA``; empty (``off``): they stay."""
    cold_after_days: int = 90
    """``FT_COLD_AFTER_DAYS``: without a job. Default 90."""
    partition_days: int = 30
    """``FT_PARTITION_DAYS``: after its end a job's partition key stays in Dagster's lists for so long. Default 30."""
    run_days: int = 90
    """``FT_RUN_DAYS``: days after its end at which a Dagster run is deleted, with its events and output. Default 90."""
    prices_file: Path | None = None
    """``FT_PRICES``: YAML in the form of ``control_plane/billing/prices.yaml``, with this platform's price lists. Default: that file."""
    oidc_issuer: str = ""
    """``FT_OIDC_ISSUER``: OpenID Connect provider with which people sign in to the console, e.g. ``https://login.example.com``. Default:
    none, and the console is for keys alone."""
    oidc_client_id: str = ""
    """``FT_OIDC_CLIENT_ID``: what the platform is called there."""
    oidc_client_secret: str = field(default="", repr=False)
    """``FT_OIDC_CLIENT_SECRET``: its secret there. Default: none, and the provider must accept a public client."""
    oidc_client_secret_file: Path | None = None
    """``FT_OIDC_CLIENT_SECRET_FILE``: file with that secret instead. Default: none."""
    oidc_operators: tuple[str, ...] = ()
    """``FT_OIDC_OPERATORS``: e-mail addresses, and groups of the provider, of the platform's operators, comma-separated. Default: none."""
    oidc_groups_claim: str = "groups"
    """``FT_OIDC_GROUPS_CLAIM``: claim with the groups of a person. Default ``groups``."""
    release_policy: str = "tenant"
    """``FT_RELEASE_POLICY``: who may release a model that did not pass its gate: ``tenant`` (its admins, and operators) or ``operator``."""
    safety_policy: Literal["allow", "block"] = "allow"
    """``FT_SAFETY_POLICY``: whether a model passes its gate whose safety was not judged, as its base refuses too little: ``allow``, with
    a warning, or ``block``."""
    console_sign_in: str = "any"
    """``FT_CONSOLE_SIGN_IN``: ``any``, or ``oidc``: keys open the API and no longer the console. Default ``any``."""
    metrics_token: str = field(default="", repr=False)
    """``FT_METRICS_TOKEN``: what a scraper of ``GET /metrics`` sends as its bearer token. Default: none, and only this machine is
    answered."""
    log_format: str = "text"
    """``FT_LOG_FORMAT``: ``text`` for people, or ``json``: a line an event, for what collects logs. Default ``text``."""
    log_level: str = "INFO"
    """``FT_LOG_LEVEL``: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``. Default ``INFO``."""
    otlp_endpoint: str = ""
    """``FT_OTLP_ENDPOINT``: OTLP/HTTP collector of spans, e.g. ``http://collector:4318`` (what it wants to see beside them:
    ``OTEL_EXPORTER_OTLP_HEADERS``). Default: none, and nothing is traced."""
    trace_share: float = 1.0
    """``FT_TRACE_SHARE``: of the requests that are in no trace yet, the share that begins one, 0 to 1. Default 1."""
    start_timeout_s: float = 180.0
    """``FT_START_TIMEOUT_S``: seconds that a service of ``ft up`` may take to become ready, before it is started again. Default 180."""
    start_attempts: int = 3
    """``FT_START_ATTEMPTS``: failed starts after which ``ft up`` gives up on a service that was never ready. Default 3."""
    hung_after_s: float = 20.0
    """``FT_HUNG_AFTER_S``: seconds without an answer to health probes after which ``ft up`` replaces a service. Default 20."""
    max_restart_pause_s: float = 60.0
    """``FT_MAX_RESTART_PAUSE_S``: longest pause of ``ft up`` between two starts of a service that keeps failing. Default 60."""
    operator_contact: str = "your operator"
    """``FT_OPERATOR_CONTACT``: whom tenants are told to ask, e.g. an e-mail address. Default ``your operator``."""

    webhook_allow: str = ""
    """``FT_WEBHOOK_ALLOW``: networks (CIDRs, comma-separated) whose addresses webhooks may go to although they are not public, by http
    too: receivers in the cluster. Every tenant's endpoints reach them. Default: none."""
    smtp_url: str = field(default="", repr=False)
    """``FT_SMTP_URL``: ``smtp://user:password@host:587`` (STARTTLS; without it only where there is no password) or ``smtps://...:465``.
    Default: none, and no e-mail is sent."""
    smtp_from: str = ""
    """``FT_SMTP_FROM``: sender of e-mails. Default ``ft-platform@`` and the host of `public_url`."""
    secrets_key_file: Path = Path("secrets.key")
    """``FT_SECRETS_KEY_FILE``: keys that encrypt secrets in the database, one a line, the newest first (mode 0600). Every process of the
    control plane needs it. Default ``<home>/secrets.key``, made at the first use."""
    signing_key_file: Path = Path("signing.key")
    """``FT_SIGNING_KEY_FILE``: Ed25519 private key in PEM (mode 0600) with which the worker signs adapters and exports; no other process
    needs it. Default ``<home>/signing.key``, made when the worker first starts."""
    internal_url: str = ""
    """``FT_INTERNAL_URL``: where workloads reach the API. Default ``http://<api_host>:<api_port>``."""
    public_url: str = ""
    """``FT_PUBLIC_URL``: where tenants reach the API, for links in e-mails. Default ``http://<api_host>:<api_port>``."""

    @property
    def work_dir(self) -> Path:
        """Node-local scratch: workloads and their checkpoints before upload."""
        return self.home / "work"

    def job_dir(self, job_id: str) -> Path:
        """Return the job's directory on this machine, shared by its attempts here."""
        return self.work_dir / "jobs" / checked_id(job_id)

    @property
    def adapters_dir(self) -> Path:
        """The directories of served adapters and their index; servers read it, and it may be a volume of its own."""
        return self.work_dir / "adapters"

    @property
    def servers_dir(self) -> Path:
        """The servers of whole models on this machine, a directory for each."""
        return self.work_dir / "servers"

    @property
    def embedded_inference(self) -> bool:
        """Whether the only inference server is the one that the local stack starts."""
        return self.inference_urls == (f"http://127.0.0.1:{self.inference_port}",)

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

    def where_objects_are(self) -> dict[str, str]:
        """Return the variables that say where objects are, without symbolic links."""
        store = urlsplit(self.object_store)
        local = Path(unquote(store.path)).resolve().as_uri() if store.scheme == "file" else self.object_store
        return {"FT_OBJECT_STORE": local, "FT_COLD_DIR": "" if self.cold_dir is None else str(self.cold_dir.resolve())}

    @property
    def embedded_database(self) -> bool:
        return not self.database_url

    @property
    def postgres_dir(self) -> Path:
        return self.home / "postgres"


def load(env: Mapping[str, str] | None = None) -> Settings:
    """Settings from `env` (default: the process environment). An empty variable counts as absent."""
    e = os.environ if env is None else env
    given = {f.name: _read(f.name, str(f.type), text) for f in fields(Settings) if (text := e.get(variable(f.name)))}
    home = given.setdefault("home", Path(".ft").absolute())
    made = Settings(**given)
    if bool(made.oidc_issuer) != bool(made.oidc_client_id) or (made.console_sign_in == "oidc" and not made.oidc_issuer):
        raise ValueError("set FT_OIDC_ISSUER and FT_OIDC_CLIENT_ID together; FT_CONSOLE_SIGN_IN=oidc needs both")
    if made.safety_policy == "block" and not made.safety_classifier:
        raise ValueError("FT_SAFETY_POLICY=block needs a classifier, or no model passes its gate: set FT_SAFETY_CLASSIFIER to builtin")
    here = f"http://{made.api_host}:{made.api_port}"
    public_url = made.public_url or here
    derived = {
        "dagster_public_url": _beside(public_url, made.dagster_port),
        "object_store": f"file://{home}/objects",
        "inference_urls": (f"http://127.0.0.1:{made.inference_port}",),
        "mlflow_uri": f"sqlite:///{home}/mlflow.db",
        "public_url": public_url,
        "internal_url": here,
        "smtp_from": f"ft-platform@{urlsplit(public_url).hostname or 'localhost'}",
        "secrets_key_file": home / "secrets.key",
        "signing_key_file": home / "signing.key",
    }
    return replace(made, **{name: value for name, value in derived.items() if name not in given})


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return VARIABLES.get(name, f"FT_{name.upper()}")


VARIABLES: Mapping[str, str] = {
    "cluster_file": "FT_CLUSTER", "pools_file": "FT_POOLS", "safety_file": "FT_SAFETY_EXAMPLES", "prices_file": "FT_PRICES",
    "eval_task_dirs": "FT_EVAL_TASKS", "eval_data_dir": "FT_EVAL_DATA", "validation_memory_bytes": "FT_VALIDATION_MEMORY_GIB",
    "eval_vllm_python": "FT_EVAL_VLLM_PYTHON",
}  # fmt: skip
"""Variables that are not named like their setting."""


def _read(name: str, kind: str, text: str) -> Any:
    try:
        return (_BY_NAME.get(name) or _BY_TYPE[kind])(text)
    except ValueError as e:
        raise ValueError(f"{variable(name)} is {text}; {e}") from None


def _checked(convert: Callable[[str], Any], needed: str, allowed: Callable[[Any], bool] = lambda _value: True) -> Callable[[str], Any]:
    """A reader that says what is `needed` where a text cannot be converted or its value is not `allowed`."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if allowed(value := convert(text)):
                return value
        raise ValueError(needed)

    return read


def _at_least(least: float, convert: Callable[[str], Any] = float) -> Callable[[str], Any]:
    return _checked(convert, f"use {least:g} or more", lambda value: value >= least)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _address(text: str) -> str:
    return text.rstrip("/")


def _unless_off(text: str) -> str:
    return "" if text == "off" else text


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _elsewhere(text: str) -> PurePosixPath:
    """A path of another machine: nothing of this one is added to it."""
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is not absolute: give the path at which the inference servers mount it")
    return PurePosixPath(text)


def _beside(url: str, port: int) -> str:
    """Return the address of another port, if `url` is of this machine."""
    host = urlsplit(url).hostname
    return f"http://{host}:{port}" if host in ("localhost", "127.0.0.1") else ""


def _is_private(url: str) -> bool:
    """Whether nobody on the way reads what is sent to `url`."""
    address = urlsplit(url)
    return address.scheme == "https" or (address.scheme == "http" and address.hostname in ("localhost", "127.0.0.1", "::1"))


_BY_TYPE: Mapping[str, Callable[[str], Any]] = {
    "str": str, "int": _checked(int, "use a whole number"), "float": _checked(float, "use a number"), "Path": _absolute,
    "Path | None": _absolute, "tuple[str, ...]": _words, "tuple[Path, ...]": lambda text: tuple(_absolute(p) for p in text.split(":") if p),
}  # fmt: skip
_SECONDS = _checked(float, "use a number of seconds above 0", lambda seconds: 0.0 < seconds < math.inf)
_BY_NAME: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        ("hub_endpoint", "judge_url", "otlp_endpoint", "prometheus_url", "public_url", "internal_url", "dagster_public_url"), _address
    ),
    **dict.fromkeys(("safety_classifier", "cold_storage_class", "mlflow_uri"), _unless_off),
    "wandb_url": lambda text: "" if text == "off" else _address(text),
    **dict.fromkeys(("heartbeat_timeout_s", "heartbeat_grace_s"), _SECONDS),
    **dict.fromkeys(("start_timeout_s", "max_restart_pause_s"), _at_least(1.0)),
    **dict.fromkeys(("prepare_runs", "run_days", "start_attempts"), _at_least(1, int)),
    "max_lora_rank": _checked(int, f"use one of {', '.join(map(str, ENGINE_RANKS))}, the ranks of vLLM", ENGINE_RANKS.__contains__),
    "hung_after_s": _at_least(6.0),  # a probe alone may take 5 s
    "api_hosts": lambda text: tuple(urlsplit(f"//{word}").hostname or word for word in _words(text)),
    "dagster_hosts": lambda text: _words(text.lower()),
    "object_store_networks": lambda text: tuple(str(ipaddress.ip_network(word)) for word in _words(text)),
    "inference_urls": lambda text: tuple(map(_address, _words(text))),
    "served_adapters_dir": _elsewhere,
    "validation_memory_bytes": lambda text: int(_BY_TYPE["float"](text) * (1 << 30)),
    "judge_family": str.casefold,
    "log_format": _checked(str, "use text or json", ("text", "json").__contains__),
    "log_level": str.upper,
    "release_policy": _checked(str, "use tenant or operator", ("tenant", "operator").__contains__),
    "safety_policy": _checked(str, "use allow or block", ("allow", "block").__contains__),
    "console_sign_in": _checked(str, "use any or oidc", ("any", "oidc").__contains__),
    "oidc_issuer": _checked(str, "use its https address, or http of this machine", _is_private),
    "trace_share": _checked(float, "use a number from 0 to 1", lambda share: 0.0 <= share <= 1.0),
}
