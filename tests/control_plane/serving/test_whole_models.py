"""A whole model from promotion to answers through the gateway: its server is a process of this machine, with its real weights."""

from __future__ import annotations

import json
import os
import signal
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import openai
import pytest
from starlette.types import ASGIApp

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.serving import model_routes, own_servers
from control_plane.serving.rollout import Reconciled, reconcile
from control_plane.tenant_data import deletion, deletion_requests
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from core.errors import Conflict
from resources.inference.fleet_client import HttpFleet
from resources.inference.local_servers import LocalServers, stop_all
from resources.launcher.process_identity import alive
from tests.support.jobs.followed_jobs import until
from tests.support.models.tiny_model import build_tiny_model
from tests.support.processes.frozen import freeze_group
from tests.support.servers.inference_server import TOKEN, free_port, inference_server
from tests.vllm.customer import Customer

pytestmark = pytest.mark.slow
PROMPT = "Hello"
START_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    customer: Customer
    client: openai.OpenAI
    """Calls the gateway with the customer's key."""

    @property
    def platform(self) -> Platform:
        return self.customer.platform

    def round(self) -> list[Reconciled]:
        own_servers.keep(self.platform)
        return reconcile(self.platform)

    def round_until(self, adapter_id: str, observed: str) -> None:
        """The worker's passes until the model is in that state."""

        def reached() -> bool:
            self.round()
            return adapters.get_adapter(self.platform, self.customer.id, adapter_id).observed == observed

        until(reached, timeout_s=START_TIMEOUT_S)

    def ask(self, model: str, user: str = "") -> str:
        made = self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=16, temperature=0, user=user
        )
        return made.choices[0].message.content or ""

    def process(self, adapter_id: str) -> tuple[int, str]:
        found = json.loads((self.platform.settings.servers_dir / adapter_id / "server.json").read_text())
        return found["pid"], found["identity"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def bench(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str], base: Path, tmp_path: Path) -> Iterator[Bench]:
    models = Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})
    with inference_server(base, port=free_port()) as url:
        plain = new_platform(drain_s="0", inference_urls=url, inference_token=TOKEN)
        fleet = HttpFleet([url], token=TOKEN)
        platform = replace(plain, models=models, fleet=fleet, servers=LocalServers(plain.settings, models))
        made, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
        customer = Customer(platform=platform, id=made.id, base=base, scratch=tmp_path)
        with openai.OpenAI(base_url=f"{serve(create_app(platform))}/v1", api_key=key.secret, max_retries=0) as client:
            yield Bench(customer=customer, client=client)
        stop_all(platform.settings)
        assert platform.servers is not None
        platform.servers.keep([])  # it waits for its children
        fleet.close()


def reference(model_dir: Path) -> str:
    """What transformers answers with the same weights."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, at their import and at their loading
        from transformers import AutoTokenizer, LlamaForCausalLM

        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        turns = [{"role": "user", "content": PROMPT}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_whole_model_is_served_as_trained_then_repaired_routed_rolled_back_and_withdrawn(bench: Bench) -> None:
    customer, platform = bench.customer, bench.platform
    trained = [build_tiny_model(customer.scratch / f"trained-{seed}", seed=seed) for seed in (5, 6)]
    first = customer.register(trained[0])
    promoted = promotions.promote(platform, customer.id, first.id)
    assert (promoted.type, promoted.stage, promoted.desired, promoted.observed) == ("full_model", "production", "loaded", "unloaded")
    bench.round_until(first.id, "loaded")
    expected = reference(trained[0])
    assert expected != reference(customer.base)
    assert bench.ask(first.name) == bench.ask(first.id) == expected

    pid, identity = bench.process(first.id)
    os.killpg(pid, signal.SIGKILL)
    until(lambda: not alive(pid, identity))
    with pytest.raises(openai.InternalServerError):
        bench.ask(first.name)
    bench.round_until(first.id, "unloaded")
    bench.round_until(first.id, "loaded")
    assert bench.process(first.id)[0] != pid
    assert bench.ask(first.name) == expected, "the repaired server has the same weights"

    adapter = customer.register(customer.trained(seed=3), suffix="other")
    promotions.promote(platform, customer.id, adapter.id)
    model_routes.put(platform, customer.id, "mixed", [(first.id, 50), (adapter.id, 50)])
    answers = {bench.ask("mixed", user=f"caller {n}") for n in range(24)}
    assert answers == {expected, bench.ask(adapter.name)}

    second = customer.register(trained[1])
    promotions.promote(platform, customer.id, second.id)
    lineage = first.name.rpartition(":")[0]
    assert bench.ask(lineage) == expected, "the one before answers until its server does"
    bench.round_until(second.id, "loaded")
    assert bench.ask(lineage) == reference(trained[1])
    promotions.rollback(platform, customer.id, second.id)
    assert bench.ask(lineage) == expected
    gone = bench.process(second.id)
    bench.round_until(second.id, "unloaded")
    until(lambda: bench.round() == [] and not (platform.settings.servers_dir / second.id).exists())
    assert not alive(*gone)

    gone = bench.process(first.id)
    promotions.deprecate(platform, customer.id, first.id)
    with pytest.raises(openai.ConflictError, match="is deprecated and not served"):
        bench.ask(first.name)
    assert bench.ask("mixed", user="caller 1") == bench.ask(adapter.name), "its callers fall to the other target"
    bench.round_until(first.id, "unloaded")
    until(lambda: bench.round() == [] and not (platform.settings.servers_dir / first.id).exists())
    assert not alive(*gone)


def test_files_that_are_not_the_registered_ones_are_not_served_and_the_model_says_why(bench: Bench) -> None:
    customer, platform = bench.customer, bench.platform
    model = customer.register(build_tiny_model(customer.scratch / "trained", seed=5))
    other = build_tiny_model(customer.scratch / "other", seed=6)
    platform.objects.put_file(f"{model.object_prefix}/model.safetensors", other / "model.safetensors")
    promotions.promote(platform, customer.id, model.id)

    def refused() -> bool:
        bench.round()
        found = adapters.get_adapter(platform, customer.id, model.id)
        assert found.observed == "unloaded"
        return "model.safetensors is absent or not the file that was registered" in str(found.detail)

    until(refused, timeout_s=START_TIMEOUT_S)
    with pytest.raises(openai.InternalServerError):
        bench.ask(model.name)


def test_data_of_a_tenant_is_deleted_once_the_server_that_has_it_is_gone(bench: Bench) -> None:
    customer, platform = bench.customer, bench.platform
    model = customer.register(build_tiny_model(customer.scratch / "trained", seed=5))
    promotions.promote(platform, customer.id, model.id)
    bench.round()
    (pid, identity), directory = bench.process(model.id), platform.settings.servers_dir / model.id
    freeze_group(pid)  # it cannot end yet
    asked = deletion_requests.request_tenant(platform, customer.id, confirm=customer.id, reason="contract ended", requested_by="key_1")
    for _ in range(2):
        assert not deletion.carry_out(platform, asked.id)
        assert deletion.get(platform, customer.id, asked.id).waiting_for == f"the server of model {model.id} has not ended yet"
        assert alive(pid, identity) and directory.is_dir()
        bench.round()
    os.killpg(pid, signal.SIGCONT)
    until(lambda: bench.round() == [] and not directory.exists())
    assert not alive(pid, identity)
    assert not deletion.carry_out(platform, asked.id)
    assert "a second look follows" in str(deletion.get(platform, customer.id, asked.id).waiting_for)


def test_a_model_that_failed_its_gate_gets_no_server(bench: Bench) -> None:
    customer = bench.customer
    made = build_tiny_model(customer.scratch / "whole", seed=3)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    model = customer.register(made)
    with pytest.raises(Conflict, match="gate_failed"):
        promotions.promote(bench.platform, customer.id, model.id)
    bench.round()
    assert not bench.platform.settings.servers_dir.exists()
