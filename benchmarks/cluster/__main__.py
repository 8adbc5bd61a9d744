"""Five hundred workloads started, adopted and watched by the launcher of a cluster, against a real API server.

    KUBEBUILDER_ASSETS=DIR python -m benchmarks.cluster [--jobs 500] [--watch-s 330] [--out benchmarks/cluster_launcher_cpu_202611.json]

The benchmark runs etcd and kube-apiserver on 127.0.0.1 and plays the rest: it admits each Job and runs its pod. The usual way,
in the same run and by the official client, creates the same Secrets and Jobs one after the other, each just before or after one of the
launcher's, and gets every Job once a second from then on. Calls are counted in the API server's audit log.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes.client import ApiClient, BatchV1Api, CoreV1Api

from benchmarks.cluster.api_server import ApiServer, running, version
from benchmarks.cluster.played_cluster import PlayedCluster
from control_plane.capacity import kueue
from control_plane.platform.protocols import WorkloadPhase
from control_plane.worker.attempt_watch import LOOK_S
from core.workload import Kind, NodeShare, Workload
from engine.scheduler.pools import Pool, equal_nodes
from resources.launcher import kubernetes_manifests as manifests
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher

PLATFORM, USUAL, TENANTS = "ft-platform", "usual", 10
POOL = Pool(name="fabric", nodes=equal_nodes(64, prefix="f", fabric="ib"), gpu_type="h100-80gb", max_gpus_per_job=8)
POLLS_S, POLLERS = 60.0, 16
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    server: ApiServer
    num_jobs: int
    watch_s: float

    def run(self) -> dict[str, Any]:
        cluster = PlayedCluster(self.server.client("cluster"))
        for name in (PLATFORM, USUAL, *{kueue.namespace(each.tenant) for each in self.workloads()}):
            cluster.add_namespace(name)
        found = {"starts": self.start()}
        for each in self.workloads():
            cluster.run(manifests.name_of(each.name), kueue.namespace(each.tenant))
        return {**found, "adoption": self.adopt(), "watch": self.watch(), "polling": self.poll()}

    def workloads(self) -> list[Workload]:
        return [workload(number) for number in range(self.num_jobs)]

    def launcher(self) -> KubernetesLauncher:
        api = KubernetesApi(self.server.client("launcher"))
        return KubernetesLauncher(api, namespace=PLATFORM, pools={POOL.name: POOL})

    def start(self) -> dict[str, Any]:
        """Start each workload by a launcher, as a step does, and in turn with it by the official client."""
        launcher, client = self.launcher(), self.server.client(USUAL)
        ours, usual, began = list[float](), list[float](), time.time()
        for number, each in enumerate(self.workloads()):
            starts: list[tuple[list[float], Callable[[], Any]]] = [
                (ours, partial(launcher.start_or_adopt, each, token="a-token")),
                (usual, partial(create, client, each)),
            ]
            for taken, start in starts if number % 2 else reversed(starts):
                taken.append(timed(start))
        return {
            "launcher": {**summary(ours), "calls_each": self.calls_each("launcher", began)},
            "usual": {**summary(usual), "calls_each": self.calls_each(USUAL, began)},
        }

    def calls_each(self, user: str, since: float) -> dict[str, float]:
        return {what: round(count / self.num_jobs, 2) for what, count in sorted(self.server.calls(user, since).items())}

    def adopt(self) -> dict[str, Any]:
        """List all workloads by a launcher that knows nothing, as a worker does when it starts; then find each by name, as a step does."""
        follower, began = self.launcher(), time.time()
        listed_s = timed(lambda: self._all_run(follower)) / 1000
        calls, again = sum(self.server.calls("launcher", began).values()), self.launcher()
        found = [timed(partial(again.get, each.name)) for each in self.workloads()]
        follower.close()
        return {"list_all_s": round(listed_s, 2), "list_all_calls": calls, "steps": summary(found)}

    def watch(self) -> dict[str, Any]:
        """Look at all workloads twice a second, as the worker does."""
        follower, names = self.launcher(), [each.name for each in self.workloads()]
        self._all_run(follower)
        looks, began, cpu_s, own_s = list[float](), time.time(), self.server.cpu_s(), time.process_time()
        while (passed_s := time.time() - began) < self.watch_s:
            looks.append(timed(lambda: [follower.get(name) for name in names]))
            time.sleep(LOOK_S)
        calls = self.server.calls("launcher", began)
        found = {"seconds": round(passed_s, 1), "looks": summary(looks), **self._load(sum(calls.values()), passed_s, cpu_s, own_s)}
        follower.close()
        return {**found, "calls": dict(sorted(calls.items()))}

    def poll(self) -> dict[str, Any]:
        """Get every Job once a second by the official client, as far as the machine can."""
        batch = BatchV1Api(self.server.client(USUAL))
        names = [manifests.name_of(each.name) for each in self.workloads()]
        rounds, began, cpu_s, own_s = 0, time.time(), self.server.cpu_s(), time.process_time()
        with ThreadPoolExecutor(POLLERS) as pool:
            while time.time() - began < POLLS_S:
                due = time.time() + 1.0
                list(pool.map(lambda name: batch.read_namespaced_job(name, USUAL), names))
                rounds += 1
                time.sleep(max(0.0, due - time.time()))
        passed_s = time.time() - began
        every_s = round(passed_s / rounds, 2)
        return {"seconds": round(passed_s, 1), "every_s": every_s, **self._load(rounds * len(names), passed_s, cpu_s, own_s)}

    def _load(self, calls: int, passed_s: float, cpu_s: float, own_s: float) -> dict[str, float]:
        """Return what calls since a moment have cost, whose CPU times are given, of the server's and of this process."""
        return {
            "calls_per_job_and_minute": round(60 * calls / passed_s / self.num_jobs, 4),
            "server_cores": round((self.server.cpu_s() - cpu_s) / passed_s, 3),
            "client_cores": round((time.process_time() - own_s) / passed_s, 3),
        }

    def _all_run(self, launcher: KubernetesLauncher) -> None:
        deadline = time.monotonic() + LIMIT_S
        while [each.phase for each in launcher.list()] != [WorkloadPhase.RUNNING] * self.num_jobs:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all workloads run after {LIMIT_S:g} s")
            time.sleep(0.05)


def workload(number: int) -> Workload:
    job, tenant = f"ftjob-{number:04}", f"tenant-{number % TENANTS}"
    return Workload(
        name=f"{job}-a1", kind=Kind.TRAIN, tenant=tenant, job=job, attempt=1, module="engine.training.runtime", processes=(1,),
        report_to="http://ft-platform-api.ft-platform:8000", image="registry.example/ft@sha256:" + "0" * 64,
        placement=(NodeShare(node=f"f-{number % 64}", devices=(number % 8,)),), labels={"pool": POOL.name, "tier": "standard"},
    )  # fmt: skip


def create(client: ApiClient, each: Workload) -> None:
    """Create a workload's Secret and Job in a namespace for all of them."""
    secret, job = manifests.secret(each, token="a-token"), manifests.job(each, POOL)
    for made in (secret, job):
        made["metadata"] |= {"namespace": USUAL, "labels": {}}
    CoreV1Api(client).create_namespaced_secret(USUAL, secret)
    BatchV1Api(client).create_namespaced_job(USUAL, job)


def timed(action: Callable[[], Any]) -> float:
    """Return the milliseconds that an action takes."""
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def summary(ms: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(ms, n=100, method="inclusive")
    return {"num": len(ms), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2), "total_s": round(sum(ms) / 1000, 2)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--watch-s", type=float, default=330.0, help="watches are renewed every 300 s")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    place: dict[str, Any] = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1), "jobs": args.jobs}
    with tempfile.TemporaryDirectory(prefix="ft-cluster-") as home, running(Path(home)) as server:
        place["kubernetes"] = version(server)
        found = place | Trial(server=server, num_jobs=args.jobs, watch_s=args.watch_s).run()
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
