"""A kubelet that runs the containers of pods as processes of this machine, with the environment and the files that their specs name."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.kubernetes.kubernetes_api import Cluster, Object
from tests.support.kubernetes.kubernetes_nodes import INDEX, TERMINAL, Nodes

ROOT = Path(__file__).parents[3]
LOOK_S = 0.05


class Kubelet:
    """Admits every Job, starts its pods each in a directory of its own, and reports how their processes end."""

    def __init__(self, cluster: Cluster, nodes: Nodes, root: Path, *, prepare: Callable[[int, Path], None]) -> None:
        self.cluster, self.nodes, self.root, self.prepare = cluster, nodes, root, prepare
        """`prepare` is called with the number of a pod and the directory that it mounts as ``/node``, before it starts."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ending = threading.Event()
        nodes.on_sigterm = self._terminate

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join()
            for process in self.processes.values():
                process.kill()
                process.wait()
            for log in self.root.glob("*/log"):
                sys.stderr.write(log.read_text())  # shown if the test fails

    def _work(self) -> None:
        while not self._ending.wait(LOOK_S):
            with self.cluster.lock:
                for job in self.cluster.find("jobs"):
                    if job["spec"]["suspend"] and not job["status"].get("conditions"):
                        self.nodes.admit(job["metadata"]["name"])
                for name in {pod["metadata"]["labels"]["job-name"] for pod in self.cluster.find("pods") if "nodeName" not in pod["spec"]}:
                    for pod in self.nodes.pods(name):
                        self._start(pod)
                    self.nodes.run(name)
                for pod in self.cluster.find("pods"):
                    code = self.processes[pod["metadata"]["uid"]].poll() if pod["metadata"]["uid"] in self.processes else None
                    if code is not None and pod["status"]["phase"] not in TERMINAL:
                        self.nodes._exit(pod, 128 - code if code < 0 else code)

    def _start(self, pod: Object) -> None:
        (container,), home = pod["spec"]["containers"], self.root / pod["metadata"]["uid"]
        mounted = {mount["mountPath"]: self._volume(pod, mount["name"], home) for mount in container["volumeMounts"]}
        number = int(pod["metadata"]["annotations"][INDEX])
        self.prepare(number, mounted["/node"])
        env = {each["name"]: self._value(pod, each) for each in container["env"]}
        env = {name: _here(value, mounted) for name, value in env.items()}
        command = [sys.executable, *container["command"][1:]]
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        with (home / "log").open("wb") as log:
            self.processes[pod["metadata"]["uid"]] = subprocess.Popen(
                command, env=kept | env, cwd=home, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _volume(self, pod: Object, name: str, home: Path) -> Path:
        """Make the directory of a volume."""
        volume = next(each for each in pod["spec"]["volumes"] if each["name"] == name)
        directory = home / name
        directory.mkdir(parents=True)
        if "secret" in volume:
            data = self._secret(pod, volume["secret"]["secretName"])
            for item in volume["secret"]["items"]:
                (directory / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
        return directory

    def _value(self, pod: Object, variable: Object) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            data = self._secret(pod, source["secretKeyRef"]["name"])
            return base64.b64decode(data.get(source["secretKeyRef"]["key"], "")).decode()
        if "fieldRef" in source:
            return str(pod["metadata"]["annotations"][source["fieldRef"]["fieldPath"].split("'")[1]])
        return str(variable["value"])

    def _secret(self, pod: Object, name: str) -> Object:
        found: Object = self.cluster.read(("secrets", pod["metadata"]["namespace"], name))["data"]
        return found

    def _terminate(self, pod: Object) -> None:
        """Ask the process of a pod to end; it is killed after its grace period."""
        if (process := self.processes.get(pod["metadata"]["uid"])) is not None:
            process.terminate()


def _here(value: str, mounted: Mapping[str, Path]) -> str:
    """Return a path in a container as it is on this machine, where nothing is mounted; any other value as it is."""
    found = next((path for path in mounted if value == path or value.startswith(f"{path}/")), None)
    return value if found is None else f"{mounted[found]}{value[len(found) :]}"
