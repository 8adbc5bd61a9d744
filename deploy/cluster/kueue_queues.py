"""Applies Kueue's objects for the pools to the cluster, as `ft admin kueue` renders them: ``python -m deploy.cluster.kueue_queues``.

Server-side apply with force: the platform owns the fields that it renders, whoever changed them. Objects of pools that are gone stay,
because workloads may still count against them; they are reported. Ends with 1 while the cluster's quotas differ from the pools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import yaml
from kubernetes import config
from kubernetes.client import ApiClient
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError, ResourceNotFoundError

from control_plane.capacity import kueue
from control_plane.capacity.kueue import API, Manifest
from control_plane.composition import open_platform
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from ft_assets.errors import FtError

OWNER = "ft-platform"
"""Manager of the fields in the cluster."""


def run(platform: Platform, client: DynamicClient) -> list[str]:
    """Apply the objects that all tenants share; returns what differs afterwards. Safe to repeat."""
    apply(client, yaml.safe_load_all(kueue.files(platform)["queues.yaml"]))
    found = client.resources.get(api_version=API, kind="ClusterQueue").get()
    return kueue.check(platform, json.dumps(found.to_dict()))


def apply(client: DynamicClient, objects: Iterable[Manifest]) -> None:
    """Create or update `objects`, which belong to no namespace, in their order."""
    for made in objects:
        resource = client.resources.get(api_version=made["apiVersion"], kind=made["kind"])
        name = made["metadata"]["name"]
        client.server_side_apply(resource, body=made, name=name, field_manager=OWNER, force_conflicts=True)
        print(f"applied {made['kind']} {name}", flush=True)


def main() -> int:
    config.load_incluster_config()
    try:
        differences = run(open_platform(load()), DynamicClient(ApiClient()))
    except ResourceNotFoundError as e:
        print(f"the cluster has no {API}: install Kueue 0.19 or later ({e})")
        return 1
    except DynamicApiError as e:
        print(f"the cluster refused: {e.status} {e.summary()}")
        return 1
    except FtError as e:
        print(e.message)
        return 1
    print("\n".join(differences) or "the cluster's quotas match the pools")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
