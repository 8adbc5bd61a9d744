"""The platform on a real cluster, installed by its chart. PostgreSQL and an object store run on this machine, where pods reach them."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import helm_python
import httpx
import openai
import sqlalchemy as sa
import yaml
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.capacity import configured_pools, kueue
from resources.database import embedded
from resources.database.engine import make_engine
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.checked_s3 import checked_s3
from tests.support.servers.faulty_proxy import proxied
from tests.support.servers.inference_server import free_port

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "ft-platform"
RELEASE = NAMESPACE = "ft-platform"
MODEL, MODELS = "tiny", "/var/lib/ft/models"
BUCKET = "ft-objects"
GPU_TYPE = "h100-80gb"
ANYBODY = {"aws_access_key_id": "anybody", "aws_secret_access_key": "anything", "region_name": "us-east-1"}
"""The object store accepts any credentials."""
Manifest = dict[str, Any]
NEEDED = {
    "KUBECONFIG": "a cluster with Kueue, a default StorageClass that several nodes can mount, and nodes with nvidia.com/gpu",
    "FT_TEST_CONTROL_PLANE_IMAGE": "repository@sha256:... of the image that `make images` builds, as the cluster's nodes know it",
    "FT_TEST_TRAINER_IMAGE": "the same of the trainer's",
}
"""Variables without which nothing can be tested, and what each names."""
ADDRESS = "FT_TEST_ADDRESS"
"""Address of this machine for pods; by default that of its way to the API server."""


def missing() -> str:
    """Return what keeps the tests from running; empty if they can."""
    if lacking := [f"{name} ({what})" for name, what in NEEDED.items() if not os.environ.get(name)]:
        return f"not set: {', '.join(lacking)}"
    return "" if kubectl_path() else "no kubectl in PATH or KUBEBUILDER_ASSETS"


def kubectl_path() -> str | None:
    beside = os.environ.get("KUBEBUILDER_ASSETS")
    return shutil.which("kubectl") or (shutil.which("kubectl", path=beside) if beside else None)


def until(found: Callable[[], Any], *, limit_s: float = 120.0, what: str = "") -> Any:
    """Return what `found` returns once it is true."""
    deadline = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what or found} did not come true within {limit_s:g} s"
        time.sleep(0.5)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubectl:
    path: str

    def __call__(self, *args: str, given: str | None = None, ok: bool = True, timeout_s: float = 180.0) -> str:
        done = subprocess.run([self.path, *args], input=given, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0 or not ok, f"kubectl {' '.join(args)}: {done.stdout}{done.stderr}"
        return done.stdout if done.returncode == 0 else done.stderr

    def apply(self, *manifests: Manifest) -> None:
        self("apply", "-f", "-", given=yaml.safe_dump_all(manifests))

    def get(self, *args: str) -> Manifest:
        found: Manifest = json.loads(self("get", *args, "-o", "json"))
        return found

    def items(self, *args: str) -> list[Manifest]:
        return list(self.get(*args)["items"])


@dataclass(kw_only=True)
class Installed:
    """The installed platform; closed by :func:`installed`."""

    kubectl: Kubectl
    values: Manifest
    config: helm_python.Config
    services: Services
    _forwards: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def ft(self, *args: str) -> str:
        """Run ``ft`` in a pod of the API, as an operator does."""
        return self.kubectl("exec", "-n", NAMESPACE, f"deploy/{RELEASE}-api", "-c", "api", "--", "ft", *args)

    def upgrade(self, values: Manifest) -> None:
        self.config.upgrade(str(CHART), RELEASE, values, namespace=NAMESPACE, wait="watcher", timeout=600)

    @cached_property
    def engine(self) -> sa.Engine:
        """The platform's database, as the owner of its schema."""
        return sa.create_engine(self.services.owner_url("127.0.0.1"), poolclass=sa.NullPool)

    @cached_property
    def api(self) -> str:
        """URL of the API's Service on this machine; another tunnel is made when the pod of the last one has gone."""
        port = free_port()
        command = [self.kubectl.path, "port-forward", "-n", NAMESPACE, f"service/{RELEASE}-api", f"{port}:8000"]
        loop = ["sh", "-c", 'while :; do "$@"; sleep 0.5; done', "sh", *command]
        self._forwards["api"] = subprocess.Popen(loop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        until(lambda: _listens(port), what="the tunnel to the API")
        return f"http://127.0.0.1:{port}"

    def new_tenant(self, *, tier: str = "standard") -> Tenant:
        name = f"c{secrets.token_hex(3)}"
        made = json.loads(self.ft("admin", "tenants", "create", name, "--tier", tier, "--json"))
        return Tenant(name=name, key=str(made["api_key"]), installed=self)

    def end(self) -> None:
        for process in self._forwards.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait(10)


@dataclass(kw_only=True)
class Tenant:
    name: str
    key: str
    installed: Installed

    @property
    def namespace(self) -> str:
        return f"t-{self.name}"

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.installed.api}/v1", api_key=self.key, max_retries=5)

    def upload(self, rows: list[Manifest]) -> str:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        return self.openai.files.create(file=("rows.jsonl", data), purpose="fine-tune").id

    def submit(self, file: str, **fields: Any) -> str:
        """Submit a job; `fields` may hold those that the OpenAI client does not know."""
        known = {name: fields.pop(name) for name in ("method", "suffix", "seed") if name in fields}
        return self.openai.fine_tuning.jobs.create(model=MODEL, training_file=file, extra_body=fields, **known).id

    def job(self, job_id: str) -> Manifest:
        return self.openai.fine_tuning.jobs.retrieve(job_id).model_dump()

    def reach(self, job_id: str, *states: str, limit_s: float = 600.0) -> Manifest:
        """Wait until the job is in one of `states`; it must not end in another one."""

        def look() -> Manifest | None:
            job = self.job(job_id)
            ended = job["status"] in ("failed", "cancelled", "succeeded") and job["state"] not in states
            assert not ended, json.dumps(job, indent=1)
            return job if job["state"] in states else None

        found: Manifest = until(look, limit_s=limit_s, what=f"{job_id} in {states}")
        return found

    def billed_gpu_seconds(self) -> float:
        answer = httpx.get(f"{self.installed.api}/v1/usage", headers={"authorization": f"Bearer {self.key}"})
        return float(answer.json()["total"]["gpu_seconds"])

    def adapter(self, adapter_id: str) -> Manifest:
        answer = httpx.get(f"{self.installed.api}/v1/adapters/{adapter_id}", headers={"authorization": f"Bearer {self.key}"})
        found: Manifest = answer.raise_for_status().json()
        return found

    def weights(self, job_id: str) -> bytes:
        """Return the weights of the job's adapter, from the object store."""
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.installed.services.s3_port}", **ANYBODY)
        listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"objects/tenants/{self.name}/jobs/{job_id}/final/")["Contents"]
        (key,) = [each["Key"] for each in listed if each["Key"].endswith("/adapter_model.safetensors")]
        return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def kubernetes_jobs(self) -> list[Manifest]:
        return self.installed.kubectl.items("jobs", "-n", self.namespace)

    def pods(self, job_id: str = "") -> list[Manifest]:
        chosen = ["-l", f"ft-platform/job={job_id}"] if job_id else []
        return self.installed.kubectl.items("pods", "-n", self.namespace, *chosen)


@contextmanager
def installed() -> Iterator[Installed]:
    """Install the chart with all that it needs, and remove everything at the end."""
    path = kubectl_path()
    assert path
    kubectl = Kubectl(path=path)
    config = helm_python.Config(namespace=NAMESPACE)
    with _services(kubectl) as services:
        made = Installed(kubectl=kubectl, values=_values(kubectl, services), config=config, services=services)
        try:
            _prepare(kubectl, services)
            _label_nodes(kubectl, made.values)
            config.install(str(CHART), RELEASE, made.values, namespace=NAMESPACE, wait="watcher", timeout=600)
            _add_model(made)
            yield made
        finally:
            made.end()
            if not os.environ.get("FT_TEST_KEEP"):
                _remove(kubectl, config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What an operator brings, on this machine."""

    address: str
    postgres_port: int
    s3_port: int
    password: str

    def owner_url(self, host: str) -> str:
        return f"postgresql+psycopg2://{embedded.OWNER}:{self.password}x@{host}:{self.postgres_port}/ft"


@contextmanager
def _services(kubectl: Kubectl) -> Iterator[Services]:
    home = Path(tempfile.mkdtemp(prefix="ft-cluster-"))
    address, password = os.environ.get(ADDRESS) or _way_to(kubectl), secrets.token_hex(16)
    server = embedded.start(home / "pg", databases=("ft",))
    socket_path = _require_passwords(home / "pg", owner=f"{password}x")
    try:
        with checked_s3("0.0.0.0") as (_, s3_port), proxied(socket_path, "0.0.0.0") as (_, postgres_port):
            httpx.put(f"http://127.0.0.1:{s3_port}/{BUCKET}").raise_for_status()
            yield Services(address=address, postgres_port=postgres_port, s3_port=s3_port, password=password)
    finally:
        embedded.stop(server)
        shutil.rmtree(home, ignore_errors=True)


def _require_passwords(postgres: Path, *, owner: str) -> str:
    """Have the server ask for passwords, that of its owner too; returns the path of its socket."""
    url = embedded.socket_url(postgres, "ft")
    engine = make_engine(url)
    with engine.begin() as conn:
        conn.execute(sa.text(f"ALTER ROLE {embedded.OWNER} PASSWORD '{owner}'"))
        (postgres / "pg_hba.conf").write_text("local all all scram-sha-256\n")
        conn.execute(sa.text("SELECT pg_reload_conf()"))
    engine.dispose()
    return f"{sa.make_url(url).query['host']}/{embedded.SOCKET_NAME}"


def _way_to(kubectl: Kubectl) -> str:
    """Return the address from which this machine reaches the API server."""
    server = urlsplit(yaml.safe_load(kubectl("config", "view", "--minify", "-o", "yaml"))["clusters"][0]["cluster"]["server"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((server.hostname, server.port or 443))
        return str(way.getsockname()[0])


def _values(kubectl: Kubectl, services: Services) -> Manifest:
    """Return the chart's values: small pods, and a pool of the nodes that have GPUs."""
    small = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "3Gi"}}
    images = {
        name: dict(zip(("repository", "digest"), os.environ[variable].split("@"), strict=True))
        for name, variable in (("controlPlane", "FT_TEST_CONTROL_PLANE_IMAGE"), ("trainer", "FT_TEST_TRAINER_IMAGE"))
    }
    return {
        "images": images,
        "objectStore": {
            "url": f"s3://{BUCKET}/objects",
            "secret": "ft-s3",
            "networks": [f"{services.address}/32"],
            "port": services.s3_port,
        },
        "pools": yaml.safe_dump({"pools": [_pool(kubectl)]}),
        "env": {"AWS_ENDPOINT_URL": f"http://{services.address}:{services.s3_port}", "AWS_DEFAULT_REGION": "us-east-1"},
        "volumes": {"models": "ft-models", "scratchSize": "5Gi"},
        **{name: {"replicas": 1, "resources": small} for name in ("api", "worker", "codeLocation", "dagsterWebserver")},
        **{name: {"resources": small} for name in ("dagsterDaemon", "runs", "jobs")},
        "networkPolicies": {
            "database": {"port": services.postgres_port, "to": [{"ipBlock": {"cidr": f"{services.address}/32"}}]},
            "kubernetesApi": {"to": [{"ipBlock": {"cidr": f"{address}/32"}} for address in _api_addresses(kubectl)]},
        },
    }


def _api_addresses(kubectl: Kubectl) -> list[str]:
    """Return where pods reach the API server: the address of its Service, and those behind it."""
    service = kubectl.get("service", "kubernetes", "-n", "default")
    behind = kubectl.items("endpointslices", "-n", "default", "-l", "kubernetes.io/service-name=kubernetes")
    return [service["spec"]["clusterIP"], *(address for each in behind for end in each["endpoints"] for address in end["addresses"])]


def _pool(kubectl: Kubectl) -> Manifest:
    """Return a pool of all nodes that offer GPUs, with small requests of cores and memory."""
    every = kubectl.items("nodes")
    nodes = [node for node in every if int(node["status"]["allocatable"].get("nvidia.com/gpu", "0"))]
    assert 0 < len(nodes) < len(every), "the tests need nodes with nvidia.com/gpu for jobs, and one without for the platform"
    gpus = {node["metadata"]["name"]: int(node["status"]["allocatable"]["nvidia.com/gpu"]) for node in nodes}
    described = [{"name": name, "gpus": count, "fabric": "one"} for name, count in gpus.items()]
    return {"name": "gpus", "gpu_type": GPU_TYPE, "nodes": described, "cpu_per_gpu": 1, "memory_gib_per_gpu": 2}


def _prepare(kubectl: Kubectl, services: Services) -> None:
    """Create what the chart expects: the namespace, Secrets, and a volume for models."""
    database = f"{services.address}:{services.postgres_port}"
    dagster, platform = (f"postgresql+psycopg2://ft_{who}:{services.password}@{database}" for who in ("dagster", "platform"))
    enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    tokens = {name: secrets.token_hex(32) for name in ("FT_DAGSTER_TOKEN", "FT_METRICS_TOKEN")}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforced}},
        _secret("ft-database", {"FT_DATABASE_URL": f"{platform}/ft", "FT_DAGSTER_DATABASE_URL": f"{dagster}/dagster"}),
        _secret("ft-database-owner", {"FT_OWNER_DATABASE_URL": services.owner_url(services.address)}),
        _secret("ft-keys", {"secrets.key": Fernet.generate_key().decode(), "signing.key": _signing_key(), **tokens}),
        _secret("ft-s3", {"AWS_ACCESS_KEY_ID": "trial", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}),
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "ft-models", "namespace": NAMESPACE}, "spec": claim},
    )


def _signing_key() -> str:
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, *form).decode()


def _label_nodes(kubectl: Kubectl, values: Manifest) -> None:
    """Label the pool's nodes as its queues select them."""
    pools = configured_pools.parse(yaml.safe_load(values["pools"]), gpu_types=(GPU_TYPE,))
    for node, labels in kueue.node_labels(pools):
        kubectl("label", "node", node, "--overwrite", *(f"{key}={value}" for key, value in labels.items()))


def _secret(name: str, values: Mapping[str, str]) -> Manifest:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}


def _add_model(made: Installed) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = build_tiny_model(Path(directory) / MODEL)
        made.kubectl("cp", "-n", NAMESPACE, "-c", "api", str(model), f"{_pod_of(made, 'api')}:{MODELS}/{MODEL}")
    made.ft("admin", "models", "add", MODEL, "--path", f"{MODELS}/{MODEL}", "--license", "Apache-2.0")


def _pod_of(made: Installed, component: str) -> str:
    pods = made.kubectl.items("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")
    return str(next(pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"))


def _remove(kubectl: Kubectl, config: helm_python.Config) -> None:
    """Remove the installation and tenants' namespaces, whose objects the platform would keep for an hour after the end of a workload."""
    with suppress(helm_python.HelmError):
        config.uninstall(RELEASE, wait="watcher", timeout=120)
    spaces = [space["metadata"]["name"] for space in kubectl.items("namespaces", "-l", "ft-platform/tenant")]
    for space in spaces:
        for kept in kubectl("get", "jobs,rolebindings", "-n", space, "-o", "name").split():
            kubectl("patch", kept, "-n", space, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    kubectl("delete", "namespace", NAMESPACE, *spaces, ok=False)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
