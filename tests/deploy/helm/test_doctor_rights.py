"""The rights that the chart gives to the doctor: enough for all of its checks of the cluster, all of them used, and only to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from deploy.doctor.check_findings import Site, run
from deploy.doctor.cluster_checks import CHECKS
from tests.deploy.helm.rendered_chart import FILES, NAMESPACE, configuration, environment, objects, of_kind
from tests.support.kubernetes.installed_cluster import installed
from tests.support.kubernetes.kubernetes_api import kubeconfig, served
from tests.support.kubernetes.kubernetes_rbac import Rbac

DOCTOR = "ft-ft-platform-doctor"


@pytest.mark.parametrize("name", FILES)
def test_the_doctor_may_read_all_that_it_reads_and_uses_each_of_its_rights(
    name: str, new_platform: Callable[..., Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod,) = of_kind(name, "Pod").values()
    assert (pod["spec"]["serviceAccountName"], pod["spec"]["containers"][0]["command"]) == (DOCTOR, ["ft", "admin", "doctor"])
    (tmp_path / "pools.yaml").write_text(of_kind(name, "ConfigMap")["ft-ft-platform-files"]["data"]["pools.yaml"])
    assert configuration(name, "pools.yaml")["pools"]
    platform = new_platform(pools=str(tmp_path / "pools.yaml"))
    tenants.create(platform, "acme", tier="premium")
    cluster, rbac = installed(platform), Rbac(installed=objects(name), namespace=NAMESPACE)
    rbac.guard(cluster)
    with served(cluster) as client:
        (tmp_path / "kubeconfig").write_text(kubeconfig(client, DOCTOR))
        env = {**environment(name), "KUBECONFIG": str(tmp_path / "kubeconfig")}
        for variable in ("KUBECONFIG", "FT_EXECUTOR", "FT_IMAGE"):
            monkeypatch.setenv(variable, env[variable])
        found = run(CHECKS, Site(settings=platform.settings))
    assert {each.status for findings in found.values() for each in findings} == {"ok"}, found
    assert rbac.unused([DOCTOR]) == set()
    assert rbac.used
