"""What vLLM would accept or die of, and that it never gets to see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.serving.rollout import reconcile
from core.errors import Conflict, FtError
from engine.adapters.package import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.support.models.tiny_adapter import Arrays
from tests.vllm.customer import Change, Customer, nan_in
from tests.vllm.reference import expected_tokens
from tests.vllm.vllm_server import SERVED, Server

LAYER = "base_model.model.model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
LOADS = "POST /v1/load_lora_adapter"


def put(**changed: np.ndarray[Any, Any]) -> Change:
    return lambda arrays: arrays | changed


def shape(module: str, side: str, rows: int, columns: int) -> Change:
    return put(**{f"{module}.lora_{side}.weight": np.ones((rows, columns), np.float32)})


def drop(key: str) -> Change:
    return lambda arrays: {k: v for k, v in arrays.items() if k != key}


def rank_16_in_tensors(arrays: Arrays) -> Arrays:
    return {k: np.concatenate([v, v], axis=0 if ".lora_A." in k else 1) for k, v in arrays.items()}


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"change": nan_in}, "not_finite"),
        ({"change": shape(Q, "A", 8, 128)}, "shape_mismatch"),
        ({"change": rank_16_in_tensors}, "shape_mismatch"),
        ({"change": shape("base_model.model.model.layers.9.self_attn.q_proj", "A", 8, 64)}, "unknown_module"),
        ({"change": shape(f"{LAYER}.self_attn.foo_proj", "A", 8, 64)}, "unknown_module"),
        ({"change": drop(f"{Q}.lora_B.weight")}, "unpaired_tensor"),
        ({"rank": 256}, "rank_not_servable"),
        ({"bias": "lora_only"}, "unsupported_feature"),
        ({"modules_to_save": ["lm_head"]}, "unsupported_feature"),
        ({"init_lora_weights": "pissa"}, "unsupported_feature"),
        ({"lora_alpha": float("nan")}, "malformed_config"),
    ],
)
def test_what_cannot_be_served_never_reaches_a_server(customer: Customer, replicas: list[Server], how: dict[str, Any], code: str) -> None:
    before = [server.text().count(LOADS) for server in replicas]
    made = customer.register(customer.trained(**how))
    assert made.stage == "quarantined"
    with pytest.raises(Conflict, match=code):
        promotions.promote(customer.platform, customer.id, str(made.id))
    reconcile(customer.platform)
    assert [server.text().count(LOADS) for server in replicas] == before
    assert all(server.ask(str(made.name), "Hello").status_code == 404 for server in replicas)


@pytest.mark.parametrize("name", [ADAPTER_WEIGHTS, ADAPTER_CONFIG])
@pytest.mark.parametrize("harm", [lambda b: b[:-7], lambda b: b[:-2] + bytes([b[-2] ^ 1]) + b[-1:]], ids=["truncated", "one bit"])
def test_files_changed_after_registration_never_reach_a_server(
    customer: Customer, replicas: list[Server], harm: Callable[[bytes], bytes], name: str
) -> None:
    before = [server.text().count(LOADS) for server in replicas]
    made = customer.register(customer.trained(seed=1))
    key = f"{made.object_prefix}/{name}"
    customer.platform.objects.put_bytes(key, harm(customer.platform.objects.get_bytes(key)))
    with pytest.raises(FtError, match="not the file that was registered"):
        promotions.promote(customer.platform, customer.id, str(made.id))
    assert [server.text().count(LOADS) for server in replicas] == before


def test_an_adapter_of_another_base_never_reaches_a_server(customer: Customer, replicas: list[Server]) -> None:
    before = [server.text().count(LOADS) for server in replicas]
    made = customer.register(customer.trained(seed=1), base_digest="e" * 64)
    with pytest.raises(Conflict, match="base_digest_mismatch"):
        promotions.promote(customer.platform, customer.id, str(made.id))
    assert [server.text().count(LOADS) for server in replicas] == before


def test_what_a_server_refuses_for_good_is_not_sent_to_it_again(customer: Customer, replicas: list[Server]) -> None:
    """Started for rank 16, they refuse 32 with a plain 500."""
    made = customer.promoted(rank=32)
    assert made.observed == "failed"
    assert "LoRA rank 32 is greater than max_lora_rank 16" in made.detail
    tried = [server.text().count(LOADS) for server in replicas]
    for _ in range(3):
        reconcile(customer.platform)
    assert [server.text().count(LOADS) for server in replicas] == tried


@pytest.mark.parametrize(
    "name",
    ["../adapters/{id}", "{id}/../{id}", "/{path}", "{path}", "ft:tiny:../..:s:{id}", "..%2f{id}", "{name}/.", "{name}\x00", "{draft}"],
)
def test_no_name_leads_out_of_the_index(customer: Customer, replicas: list[Server], name: str) -> None:
    served = customer.promoted(seed=1)
    draft = customer.register(customer.trained(seed=2))
    asked = name.format(id=served.id, path=customer.files(served), name=served.name, draft=draft.name)
    for server in replicas:
        known = server.names()
        assert server.ask(asked, "Hello").status_code in (400, 404)
        assert server.names() == known
        assert server.tokens(served.name, "Hello", tokens=2)


def test_files_that_changed_on_the_node_are_not_served_again(customer: Customer, replicas: list[Server]) -> None:
    """A replica that has it in memory goes on; one that looks it up refuses, and says why in its log."""
    made, server = customer.promoted(seed=3), replicas[0]
    weights = customer.files(made) / ADAPTER_WEIGHTS
    whole = weights.read_bytes()
    server.unload(made.name)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert server.ask(made.name, "Hello").status_code == 404
    assert f"adapter '{made.name}' is not served: {weights} has sha256" in server.text()
    weights.write_bytes(whole)
    assert server.tokens(made.name, "Hello") == list(expected_tokens(customer.base, customer.files(made), "Hello"))


def test_an_adapter_of_the_index_for_another_base_is_not_served(customer: Customer, replicas: list[Server]) -> None:
    made, server = customer.promoted(seed=4), replicas[0]
    index = next(Path(customer.files(made).parent).glob("index-*.json"))
    entries = json.loads(index.read_text())
    server.unload(made.name)
    entries[made.name]["base_digest"] = "e" * 64
    index.write_text(json.dumps(entries))
    assert server.ask(made.name, "Hello").status_code == 404
    assert f"adapter '{made.name}' is not served: it was made for base {'e' * 19}" in server.text()
    reconcile(customer.platform)  # the platform puts its index right, and the adapter where it belongs
    assert server.tokens(made.name, "Hello", tokens=2)


def test_a_tenants_bad_luck_is_not_the_others(customer: Customer, replicas: list[Server]) -> None:
    """After all of the above: base and adapters answer as on the first day, and no engine was lost."""
    made = customer.promoted(seed=5)
    for server in replicas:
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert server.tokens(SERVED, "Hello") == list(expected_tokens(customer.base, None, "Hello"))
        assert server.tokens(made.name, "Hello") == list(expected_tokens(customer.base, customer.files(made), "Hello"))
    assert adapters.get_adapter(customer.platform, customer.id, made.id).observed == "loaded"
