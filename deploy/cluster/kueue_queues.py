"""Applies Kueue's objects for the pools to the cluster, as `ft admin kueue` renders them: ``python -m deploy.cluster.kueue_queues``.

Server-side apply with force: the platform owns the fields that it renders, whoever changed them. Objects of pools that are gone stay,
because workloads may still count against them; they are reported. Ends with 1 while the cluster's quotas differ from the pools.
"""

from __future__ import annotations

import json
import sys

import yaml

from control_plane.capacity import kueue
from control_plane.composition import open_platform
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from core.errors import FtError
from resources.launcher.kubernetes_api import CLUSTER_QUEUES, KubernetesApi


def run(platform: Platform, api: KubernetesApi) -> list[str]:
    """Apply the objects that all tenants share; returns what differs afterwards. Safe to repeat."""
    for made in yaml.safe_load_all(kueue.files(platform)["queues.yaml"]):
        api.apply(made)
        print(f"applied {made['kind']} {made['metadata']['name']}", flush=True)
    found = [{"kind": CLUSTER_QUEUES.kind, **each} for each in api.list(CLUSTER_QUEUES, labels="")]
    return kueue.check(platform, json.dumps({"items": found}))


def main() -> int:
    try:
        differences = run(open_platform(load()), KubernetesApi.from_environment())
    except FtError as e:
        print(f"{e.message}; install Kueue 0.19 or later" if e.code == "cluster_object_missing" else e.message)
        return 1
    print("\n".join(differences) or "the cluster's quotas match the pools")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
