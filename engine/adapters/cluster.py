"""Common parts of cluster objects: names, labels, and pods with no more rights than a model server needs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from engine.training import CONTEXT_BYTES, GIB, GPUS, ModelShape

ClusterObject = dict[str, Any]
"""One object, as written in YAML."""
IMAGE_DIGEST = re.compile(r"[a-z0-9][\w./:-]*@sha256:[0-9a-f]{64}", re.ASCII)
PORT = 8000
SERVER_USER = 10_001
"""Any user but root: nothing in the images belongs to it."""
GPU_SHARE = 0.9
"""Share of a GPU's memory that vLLM uses (its ``--gpu-memory-utilization``)."""
FULL_SEQUENCES = 4
"""Least sequences of full length that fit into the cache; vLLM does not start if not one fits."""
WORKING_BYTES = 3 * GIB
"""Memory on each GPU for activations of a batch of prompts, and CUDA graphs."""
PARALLEL = (1, 2, 4, 8)
POOL_FIELDS = ("replicas", "max_loras", "max_cpu_loras")
WEIGHT_BYTES = 2
"""Bytes per parameter, served in bfloat16."""
TRAINED_PROMPTS = ("--chat-template-content-format", "string")
"""Arguments with which vLLM gives a template what training gives it: content as one text, whatever vLLM concludes from the template."""
VLLM = ("python3", "-m", "vllm.entrypoints.openai.api_server")
"""Avoids the ``vllm`` command: builds for other hardware are distributed under other names, which that command does not find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """The operator's settings for model servers."""

    vllm_image: str
    """By digest, so that the image does not change. For pools, with the plugin of ``deploy/vllm`` in it."""
    platform_image: str
    """By digest, with this package: fetches and checks a model's files before its server starts."""
    object_store: str
    """``s3://bucket/prefix``, as the platform's ``FT_OBJECT_STORE``."""
    namespace: str = "ft-platform"
    """The platform's own namespace: a claim can be mounted only in its namespace, and platform and servers share the adapters'."""
    gpu: str = "h100-80gb"
    """A key of ``engine.training.memory.GPUS``: how much memory a server has."""
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    base_models_claim: str = "ft-base-models"
    """Volume claim with a directory for each base model, read-only; named by the model's digest."""
    adapters_claim: str = "ft-adapters"
    """Volume claim with the directories of served adapters and their index, ``ReadWriteMany``: the platform mounts it at
    ``<FT_HOME>/work/adapters`` and writes, servers read."""
    credentials_secret: str = "ft-object-store"
    """Secret whose keys are environment variables of the object store's client: read access is enough."""
    inference_secret: str = "ft-inference"
    """Secret whose key ``token`` is the platform's ``FT_INFERENCE_TOKEN``: servers require it for ``/v1``."""
    max_model_len: int = 8192
    """Tokens of prompt and answer together, if the model can take more: cache space is paid for in GPUs."""
    gateway_namespace: str = ""
    """Namespace of the inference gateway, whose proxy calls the servers that the endpoint picker names. Empty: there is none."""
    pools: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Base models that the platform serves itself, each with a pool of servers: ``replicas`` (2), ``max_loras`` (8) and ``max_cpu_loras``
    (256) by the model's id."""
    callers: tuple[str, ...] = ()
    """Additional namespaces whose pods may call a server, besides `namespace` (with the platform and the endpoint picker in it) and the
    gateway's. vLLM requires its key under ``/v1`` only; anyone who reaches it may call the rest (``/metrics``, ``/tokenize``)."""

    def __post_init__(self) -> None:
        for name in ("vllm_image", "platform_image"):
            if not IMAGE_DIGEST.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)!r} does not end in @sha256:<64 digits>; pin the image by its digest")
        for model, size in self.pools.items():
            if not size.keys() <= set(POOL_FIELDS) or min(size.values(), default=1) < 1:
                raise ValueError(f"pool {model}: {dict(size)} is not valid; give {', '.join(POOL_FIELDS)} of 1 or more")
        if self.gpu not in GPUS or GPUS[self.gpu].is_cpu:
            known = ", ".join(name for name, gpu in GPUS.items() if not gpu.is_cpu)
            raise ValueError(f"gpu {self.gpu!r} is not known; use one of {known}")


def num_gpus(shape: ModelShape, settings: ClusterSettings, *, max_model_len: int, adapters_bytes: int = 0) -> int:
    """Returns the fewest GPUs that hold weights, adapters and a cache; ``ValueError`` if a node's eight do not.

    A GPU holds whole heads, so only numbers that divide them are considered.
    """
    cache = 2 * shape.num_layers * shape.kv_size * WEIGHT_BYTES * max_model_len * FULL_SEQUENCES
    needed = shape.num_parameters * WEIGHT_BYTES + cache + adapters_bytes
    usable = int(GPUS[settings.gpu].memory_bytes * GPU_SHARE) - CONTEXT_BYTES - WORKING_BYTES
    for count in PARALLEL:
        if shape.num_heads % count == 0 and shape.num_kv_heads % count == 0 and needed <= count * usable:
            return count
    raise ValueError(
        f"{needed / GIB:.0f} GiB do not fit on {PARALLEL[-1]} x {settings.gpu}, or {shape.num_kv_heads} key-value heads do not divide by "
        "as many as it takes; use larger GPUs, or a shorter context_length"
    )


def label_value(value: str) -> str:
    """Returns `value` as the value of a label: unchanged if allowed, else shortened with a hash."""
    if re.fullmatch(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", value, re.ASCII):
        return value
    safe = re.sub(r"[^A-Za-z0-9]+", "-", value).strip("-")[:50].rstrip("-")
    return f"{safe}-{hashlib.sha256(value.encode()).hexdigest()[:10]}".lstrip("-")


def kubernetes_name(*parts: str, longest: int = 63) -> str:
    """Returns a name that Services accept too: lower-case letters, digits and hyphens, at most `longest`. Different parts give different
    names."""
    text = "-".join(parts)
    safe = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if safe == text and len(safe) <= longest and len(parts) <= 2:
        return safe
    return f"{safe[: min(50, longest - 11)].rstrip('-')}-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:10]}"


def manifest(
    kind: str,
    name: str,
    settings: ClusterSettings,
    labels: Mapping[str, str],
    spec: ClusterObject,
    *,
    api_version: str = "v1",
    **annotations: str,
) -> ClusterObject:
    found: ClusterObject = {"name": name, "namespace": settings.namespace, "labels": dict(labels)}
    if annotations:
        found["annotations"] = {f"ft-platform/{key.replace('_', '-')}": value for key, value in sorted(annotations.items())}
    return {"apiVersion": api_version, "kind": kind, "metadata": found, "spec": spec}


def labels(component: str, instance: str, **more: str) -> dict[str, str]:
    own = {"app.kubernetes.io/part-of": "ft-platform", "app.kubernetes.io/component": component, "app.kubernetes.io/instance": instance}
    return own | {f"ft-platform/{key.replace('_', '-')}": label_value(value) for key, value in sorted(more.items())}


def label_selector(component: str, instance: str) -> dict[str, str]:
    """Returns the immutable labels of a server's pods."""
    return {"app.kubernetes.io/component": component, "app.kubernetes.io/instance": instance}


def pod_container(
    name: str, image: str, *, command: Sequence[str], env: Mapping[str, str], mounts: Iterable[ClusterObject]
) -> ClusterObject:
    """Security context of a container that can write only to its mounts and cannot gain privileges."""
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in sorted(env.items())],
        "volumeMounts": list(mounts),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the pod's status says why it ended
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def vllm_container(
    settings: ClusterSettings, args: Sequence[str], *, gpus: int, env: Mapping[str, str], mounts: Iterable[ClusterObject]
) -> ClusterObject:
    """vLLM with its probes: receives no requests before its weights are loaded, and is replaced when its engine has died (``/health`` is
    503 then)."""
    quiet = {"HOME": "/tmp", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CACHE_ROOT": "/tmp/vllm"}
    command = [*VLLM, *args, "--port", str(PORT)]
    if gpus > 1:
        command += ["--tensor-parallel-size", str(gpus)]
    made = pod_container("vllm", settings.vllm_image, command=command, env=quiet | dict(env), mounts=mounts)
    health = {"httpGet": {"path": "/health", "port": "http"}}
    devices = {settings.gpu_resource: str(gpus)}
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": settings.inference_secret, "key": "token"}}}
    return made | {
        "env": [*made["env"], key],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": health | {"periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": health | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": health | {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3},
        "resources": {
            "requests": {**devices, "cpu": str(4 * gpus), "memory": f"{16 + 16 * gpus}Gi"},
            "limits": {**devices, "memory": f"{16 + 32 * gpus}Gi"},
        },
    }


def pod(
    settings: ClusterSettings,
    labels: Mapping[str, str],
    *,
    containers: Sequence[ClusterObject],
    volumes: Sequence[ClusterObject],
    init: Sequence[ClusterObject] = (),
) -> ClusterObject:
    """A pod under the cluster's restricted profile, without a token of the cluster's API."""
    spec: ClusterObject = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 120,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": SERVER_USER, "runAsGroup": SERVER_USER, "fsGroup": SERVER_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [scratch("tmp"), {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}, *volumes],
    }  # fmt: skip
    if init:
        spec["initContainers"] = list(init)
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    return {"metadata": {"labels": dict(labels)}, "spec": spec}


def scratch(name: str, *, limit_bytes: int = 0) -> ClusterObject:
    return {"name": name, "emptyDir": {"sizeLimit": f"{-(-limit_bytes // 2**20)}Mi"} if limit_bytes else {}}


def mount(name: str, path: str, *, read_only: bool = False, sub_path: str = "") -> ClusterObject:
    found: ClusterObject = {"name": name, "mountPath": path}
    return found | ({"readOnly": True} if read_only else {}) | ({"subPath": sub_path} if sub_path else {})


def claim(name: str, claim_name: str) -> ClusterObject:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim_name, "readOnly": True}}


SERVER_MOUNTS = (mount("tmp", "/tmp"), mount("shm", "/dev/shm"))


def only_callers(name: str, settings: ClusterSettings, labels: Mapping[str, str], selects: Mapping[str, str]) -> ClusterObject:
    """Ingress from the servers' own namespace, the gateway's and the callers', to one port."""
    spaces = dict.fromkeys(space for space in (settings.namespace, settings.gateway_namespace, *settings.callers) if space)
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}}} for space in spaces]
    spec = {
        "podSelector": {"matchLabels": dict(selects)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers, "ports": [{"protocol": "TCP", "port": PORT}]}],
    }
    return manifest("NetworkPolicy", name, settings, labels, spec, api_version="networking.k8s.io/v1")


def objects_yaml(objects: Iterable[ClusterObject]) -> str:
    """Returns one YAML document for each object, with fields in the usual order."""
    return "---\n".join(yaml.safe_dump(o, sort_keys=False, width=140) for o in objects)
