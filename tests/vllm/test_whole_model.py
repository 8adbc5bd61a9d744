"""A model trained whole, on a server of its own: what the manifest says is done by hand, and it answers as it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from control_plane.adapters.service import get_adapter
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from engine.adapters import cluster, servers
from engine.adapters.cluster import ClusterSettings
from engine.training import model_shapes
from resources.inference import fetch_package
from tests.vllm.customer import Customer
from tests.vllm.reference import expected_tokens
from tests.vllm.vllm_server import SERVED, Server, build_servable_model

DIGEST = "@sha256:" + "0" * 64
SETTINGS = ClusterSettings(vllm_image=f"vllm{DIGEST}", platform_image=f"ft{DIGEST}", object_store="s3://ft/objects")


def test_the_rendered_commands_serve_the_registered_model(
    vllm_python: Path, unserved: Platform, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = tenants.create(unserved, "whole-model", tier="standard")
    trained = build_servable_model(tmp_path / "trained", seed=5)
    customer = Customer(platform=unserved, id=made.id, base=base, scratch=tmp_path)
    model = customer.register(trained)
    record, shape = get_adapter(unserved, made.id, model.id), model_shapes.shape_of(SERVED, directory=base)
    rendered = yaml.safe_load_all(cluster.objects_yaml(servers.render_server(record, shape, SETTINGS, context_length=512)))
    pod = next(o for o in rendered if o["kind"] == "Deployment")["spec"]["template"]["spec"]

    fetch, model_dir = pod["initContainers"][0]["command"][3:], tmp_path / "model"
    monkeypatch.setenv("FT_OBJECT_STORE", f"file://{unserved.settings.home}/objects")
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    here = {"/model": str(model_dir), f"/base-models/{record.base_digest}": str(base)}
    assert fetch_package.main([here.get(word, word) for word in fetch]) == 0

    server = Server(python=vllm_python, base=base, base_digest=record.base_digest, adapters=tmp_path, log=tmp_path / "log")
    # On a CPU: exact in float32, a small cache, and no GPU to share.
    changed = here | {"python3": str(vllm_python), "bfloat16": "float32", str(cluster.PORT): str(server.port)}
    server.command = [changed.get(word, word) for word in pod["containers"][0]["command"]]
    server.command += ["--host", "127.0.0.1", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]
    server.start()
    try:
        server.wait()
        expected = list(expected_tokens(model_dir, None, "Hello"))
        assert server.tokens(record.name, "Hello") == expected
        assert expected != list(expected_tokens(base, None, "Hello"))
    finally:
        server.stop()
