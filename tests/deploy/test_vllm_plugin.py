"""The door of a vLLM server: which names it opens for, and on which bytes. Without vLLM: that is tests/vllm."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.adapters import package, serving_index
from engine.adapters.record import make_adapter_name
from engine.adapters.serving_index import IndexEntry
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

BASE = "b" * 64
INDEX = serving_index.index_filename(BASE)
ID = "adp-0123456789abcdef01234567"
NAME = "ft:tiny:acme:support:0123456789ab"


def _module(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "deploy" / "vllm" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


turns, plugin = _module("ft_fair_turns"), _module("ft_vllm_plugin")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of served adapters, with one, and the index."""
    scratch = tmp_path_factory.mktemp("made")
    source = build_tiny_adapter(scratch / "trained", build_tiny_model(scratch / "base"), base_name="tiny")
    package.write_package(source, scratch / "adapters" / ID, served_name="tiny", base_digest=BASE)
    return scratch / "adapters"


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapters"))


def entry(root: Path, **changes: str) -> IndexEntry:
    sha256 = hashlib.sha256((root / ID / package.PACKAGE_MANIFEST).read_bytes()).hexdigest()
    return IndexEntry(**({"name": NAME, "directory": ID, "manifest_sha256": sha256, "base_digest": BASE} | changes))


def registered(root: Path, location: str | None = None) -> Any:
    index = {"FT_ADAPTER_INDEX": location or str(root / INDEX), "FT_ADAPTER_ROOT": str(root), "FT_BASE_DIGEST": BASE}
    return plugin.configured(index)


def test_an_adapter_of_the_index_is_found(root: Path) -> None:
    serving_index.write_index(root / INDEX, [entry(root)])
    assert registered(root).directory(NAME) == root / ID


def test_what_the_platform_names_is_a_name() -> None:
    for base in ("tiny", "meta-llama/Llama-3.1-8B-Instruct", "demo-llama-3m"):
        for suffix in (None, "Support Bot!", "x" * 200):
            assert plugin.NAME.fullmatch(str(make_adapter_name(base, "t-1_a", suffix, "0123456789ab")))


@pytest.mark.parametrize(
    "name",
    [
        "", "tiny", "../adp-0123456789abcdef01234567", f"../{NAME}", f"{NAME}/..", "ft:../..:acme:s:1", "ft:a/../b:acme:s:1", "/etc/passwd",
        "ft:tiny:../../x:s:1", "ft:tiny:acme:s/../..:1", "ft:tiny:acme:s:..", f"{NAME}\n", f"{NAME}\x00", "ft:tiny:acme:s:%2e%2e",
        "ft:.hidden:acme:s:1", "ft:tiny\\x:acme:s:1", "ft:tíny:acme:s:1", "ft:" + "a" * 500 + ":acme:s:1", "adp-../../../../etc",
    ],
)  # fmt: skip
def test_what_is_no_name_is_not_looked_up(root: Path, name: str) -> None:
    """Not even where somebody had put it into the index."""
    body = {name: {"directory": ID, "manifest_sha256": entry(root).manifest_sha256, "base_digest": BASE}}
    (root / INDEX).write_text(json.dumps(body))
    assert registered(root).directory(name) is None


@pytest.mark.parametrize("directory", ["", ".", "..", f"../{ID}", f"{ID}/../{ID}", f"/{ID}", f"{ID}/", ".hidden", "absent", "a\x00b"])
def test_a_directory_that_is_not_one_below_the_root_is_refused(root: Path, directory: str) -> None:
    (root / ".hidden").mkdir()
    serving_index.write_index(root / INDEX, [entry(root, directory=directory)])
    with pytest.raises(plugin.Refused, match=r"not one segment below|not a directory"):
        registered(root).directory(NAME)


def test_a_directory_for_another_base_has_its_mark_in_the_name(root: Path) -> None:
    (root / ID).rename(root / f"{ID}@{'b' * 16}")
    sha256 = hashlib.sha256((root / f"{ID}@{'b' * 16}" / package.PACKAGE_MANIFEST).read_bytes()).hexdigest()
    serving_index.write_index(root / INDEX, [IndexEntry(name=NAME, directory=f"{ID}@{'b' * 16}", manifest_sha256=sha256, base_digest=BASE)])
    assert registered(root).directory(NAME) == root / f"{ID}@{'b' * 16}"


def test_a_linked_directory_is_refused(root: Path, tmp_path: Path) -> None:
    (root / ID).rename(tmp_path / "elsewhere")
    (root / ID).symlink_to(tmp_path / "elsewhere")
    serving_index.write_index(root / INDEX, [entry(root)])
    with pytest.raises(plugin.Refused, match="not a directory"):
        registered(root).directory(NAME)


@pytest.mark.parametrize("victim", [package.ADAPTER_WEIGHTS, package.ADAPTER_CONFIG, package.PACKAGE_MANIFEST])
def test_one_changed_byte_is_refused(root: Path, victim: str) -> None:
    serving_index.write_index(root / INDEX, [entry(root)])
    body = bytearray((root / ID / victim).read_bytes())
    body[-2] ^= 1
    (root / ID / victim).write_bytes(body)
    with pytest.raises(plugin.Refused, match="has sha256"):
        registered(root).directory(NAME)


def _extra_file(adapter: Path) -> None:
    (adapter / "pytorch_model.bin").write_bytes(b"\x80")


def _linked_weights(adapter: Path) -> None:
    (adapter / package.ADAPTER_WEIGHTS).rename(adapter.parent / "weights")
    (adapter / package.ADAPTER_WEIGHTS).symlink_to(adapter.parent / "weights")


def _absent_weights(adapter: Path) -> None:
    (adapter / package.ADAPTER_WEIGHTS).unlink()


@pytest.mark.parametrize("harm", [_extra_file, _linked_weights, _absent_weights])
def test_files_that_are_not_the_registered_ones_are_refused(root: Path, harm: Callable[[Path], None]) -> None:
    serving_index.write_index(root / INDEX, [entry(root)])
    harm(root / ID)
    with pytest.raises((plugin.Refused, OSError)):
        registered(root).directory(NAME)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_digest": "c" * 64}, "it was made for base c{19}, this server runs b{19}"),
        ({"base_digest": ""}, r"\(none\)"),
        ({"manifest_sha256": "0" * 64}, "the index says 0{64}"),
        ({"manifest_sha256": ""}, "no sha256 of its manifest"),
    ],
)
def test_another_base_or_manifest_is_refused(root: Path, change: dict[str, str], says: str) -> None:
    serving_index.write_index(root / INDEX, [entry(root, **change)])
    with pytest.raises(plugin.Refused, match=says):
        registered(root).directory(NAME)


def test_a_manifest_for_another_base_is_refused_whatever_the_index_says(root: Path, made: Path) -> None:
    shutil.rmtree(root / ID)
    sha256 = package.write_package(made / ID, root / ID, served_name="tiny", base_digest="c" * 64)
    serving_index.write_index(root / INDEX, [entry(root, manifest_sha256=sha256)])
    with pytest.raises(plugin.Refused, match="its manifest names base c"):
        registered(root).directory(NAME)


def test_only_lora_is_served(root: Path, made: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(made / ID, tmp_path / "source"))
    config = json.loads((source / package.ADAPTER_CONFIG).read_text())
    (source / package.ADAPTER_CONFIG).write_text(json.dumps({**config, "peft_type": "IA3"}))
    shutil.rmtree(root / ID)
    sha256 = package.write_package(source, root / ID, served_name="tiny", base_digest=BASE)
    serving_index.write_index(root / INDEX, [entry(root, manifest_sha256=sha256)])
    with pytest.raises(plugin.Refused, match="peft_type is 'IA3'"):
        registered(root).directory(NAME)


def test_the_index_is_read_again_when_it_is_replaced(root: Path) -> None:
    serving_index.write_index(root / INDEX, [])
    server = registered(root)
    assert server.directory(NAME) is None
    assert serving_index.write_index(root / INDEX, [entry(root)])
    assert server.directory(NAME) == root / ID
    assert not serving_index.write_index(root / INDEX, [entry(root)])
    serving_index.write_index(root / INDEX, [])
    assert server.directory(NAME) is None


@pytest.mark.parametrize("text", ["[]", "{", "null", f'{{"{NAME}": "{ID}"}}', None])
def test_without_a_readable_index_nothing_is_served(root: Path, text: str | None) -> None:
    serving_index.write_index(root / INDEX, [entry(root)])
    server = registered(root)
    assert server.directory(NAME) is not None
    index = root / INDEX
    index.unlink() if text is None else index.write_text(text)
    with pytest.raises(plugin.Refused, match="index"):
        server.directory(NAME)


def test_the_index_may_be_behind_an_address(root: Path, serve: Callable[[ASGIApp], str]) -> None:
    async def index(_: Request) -> Response:
        return Response(serving_index.render([entry(root)]))

    url = serve(Starlette(routes=[Route("/index.json", index)]))
    assert registered(root, f"{url}/index.json").directory(NAME) == root / ID
    with pytest.raises(plugin.Refused, match="cannot be read"):
        registered(root, f"{url}/absent").directory(NAME)
    with pytest.raises(plugin.Refused, match="cannot be read"):
        registered(root, "http://127.0.0.1:9/index.json").directory(NAME)


def test_a_server_that_is_told_half_of_it_does_not_start() -> None:
    assert plugin.configured({}) is None
    with pytest.raises(ValueError, match="FT_BASE_DIGEST must be"):
        plugin.configured({"FT_ADAPTER_INDEX": "/x/index.json"})
    with pytest.raises(ValueError, match="FT_ADAPTER_ROOT must say"):
        plugin.configured({"FT_ADAPTER_INDEX": "http://x/index.json", "FT_BASE_DIGEST": BASE})


def test_an_index_has_a_name_once_and_no_order(root: Path) -> None:
    one, two = entry(root), entry(root, name="adp-0123456789ab")
    assert serving_index.render([one, two]) == serving_index.render([two, one])
    with pytest.raises(ValueError, match="twice"):
        serving_index.render([one, one])


def test_rows_without_an_adapter_get_nothing_from_any() -> None:
    """The arithmetic of the repair, on the operation as the CPU kernels do it."""
    import torch

    def gathers(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scale: float) -> None:
        output += torch.einsum("bi,boi->bo", inputs, weights[indices]) * scale

    rng = torch.Generator().manual_seed(1)
    weights, inputs = torch.randn(3, 5, 4, generator=rng), torch.randn(4, 4, generator=rng)
    indices = torch.tensor([0, -1, 2, -1])
    unrepaired, repaired = torch.zeros(4, 5), torch.zeros(4, 5)
    gathers(inputs, weights, unrepaired, indices, 2.0)
    operation = plugin.without_base_rows(plugin.without_base_rows(gathers))
    operation(inputs, weights, repaired, indices, 2.0)
    assert np.abs(unrepaired[1].numpy()).max() > 0  # the fault is there to be repaired
    assert repaired[[1, 3]].abs().max() == 0
    assert torch.equal(repaired[[0, 2]], unrepaired[[0, 2]])


class Scheduler:
    """The part of vLLM's that its queue sees, with its loop over the waiting requests."""

    def __init__(self, places: int, *, max_loras: int = 0) -> None:
        self.max_num_active_reqs, self.running = places, list[Any]()
        self.lora_config = SimpleNamespace(max_loras=max_loras) if max_loras else None
        self.waiting = plugin.TenantQueue(self)

    def schedule(self, *, skip: Callable[[Any], bool] = lambda _: False) -> list[str]:
        """Admit what may join, except what cannot yet run; returns the names of those that joined."""
        self.waiting.begin_step()
        joined, skipped = [], list[Any]()
        adapters = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        while self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.peek_request()
            assert self.waiting.pop_request() is request
            adapter = {request.lora_request.lora_int_id} if request.lora_request else set()
            if skip(request) or (self.lora_config and len(adapters | adapter) > self.lora_config.max_loras):
                skipped.insert(0, request)
                continue
            adapters |= adapter
            self.running.append(request)
            joined.append(request.request_id)
        self.waiting.prepend_requests(skipped)
        return joined

    def step(self) -> list[str]:
        """Admit, give each running request a token, and end those with 10; returns the names of the ended."""
        self.schedule()
        for request in self.running:
            request.num_output_tokens += 1
        ended = [r.request_id for r in self.running if r.num_output_tokens >= 10]
        self.running = [r for r in self.running if r.request_id not in ended]
        return ended


def asks(name: str, tenant: str, *, weight: int = 1, prompt: int = 10, adapter: int = 0) -> Any:
    extra = {"ft_tenant": tenant, "ft_weight": weight}
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_output_tokens=0, sampling_params=SimpleNamespace(extra_args=extra),
        lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None, arrival_time=time.time(),
    )  # fmt: skip


def flooded(places: int, *, by: str = "loud", count: int = 50) -> Scheduler:
    made = Scheduler(places)
    for number in range(count):
        made.waiting.add_request(asks(f"{by}{number}", by))
    return made


def test_in_vllm_a_flood_leaves_a_quarter_of_the_places_to_tenants_with_none_running() -> None:
    made = flooded(8)
    assert made.schedule() == [f"loud{n}" for n in range(6)], "its own in the order in which they came"
    assert not made.waiting and len(made.waiting) == 44
    made.waiting.add_request(asks("quiet0", "quiet"))
    made.waiting.add_request(asks("quiet1", "quiet"))
    assert made.schedule() == ["quiet0"], "at once; its second one by turn"
    for request in made.running[:6]:
        request.num_output_tokens += 10
    del made.running[0]
    assert made.schedule() == [], "the last quarter is for tenants that have none"
    del made.running[0]
    assert made.schedule() == ["quiet1"]


def test_in_vllm_tenants_that_always_wait_receive_tokens_by_weight() -> None:
    rng, made, tokens, weights = random.Random(1), Scheduler(8), Counter[str](), {"a": 1, "b": 3}
    ends = {"a": 0.02, "b": 0.2}  # long answers count for as many as they are
    for step in range(5000):
        for tenant, weight in weights.items():
            while sum(r.sampling_params.extra_args["ft_tenant"] == tenant for r in made.waiting) < 8:
                made.waiting.add_request(asks(f"{tenant}{step}-{len(made.waiting)}", tenant, weight=weight, prompt=1))
        made.schedule()
        for request in made.running:
            request.num_output_tokens += 1
            tokens[request.sampling_params.extra_args["ft_tenant"]] += 1
        made.running = [r for r in made.running if rng.random() > ends[r.sampling_params.extra_args["ft_tenant"]]]
    assert tokens["b"] / tokens.total() == pytest.approx(0.75, abs=0.05)


def test_in_vllm_requests_that_cannot_run_yet_keep_their_places_and_owe_nothing() -> None:
    made = flooded(8, count=3)
    before = made.waiting._turns.received(turns.Share(tenant="loud"))
    assert made.schedule(skip=lambda request: request.request_id in ("loud0", "loud1")) == ["loud2"]
    assert made.waiting._turns.received(turns.Share(tenant="loud")) - before == 5.0, "half of the one prompt that joined"
    assert [r.request_id for r in made.waiting] and made.schedule() == ["loud0", "loud1"]


def test_in_vllm_a_preempted_request_comes_back_before_its_tenants_others_and_ended_ones_leave() -> None:
    made = flooded(4, count=5)
    assert made.schedule() == ["loud0", "loud1", "loud2"]
    made.waiting.prepend_request(made.running.pop())
    made.waiting.remove_requests([r for r in made.waiting if r.request_id == "loud3"])
    assert len(made.waiting) == 2
    del made.running[:]
    assert made.schedule() == ["loud2", "loud4"] and not len(made.waiting)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-ft-tenant": "acme", "x-ft-weight": "4"}, {"ft_tenant": "acme", "ft_weight": 4}),
        ({"x-ft-tenant": "acme", "x-ft-weight": "-4"}, {"ft_tenant": "acme", "ft_weight": 1}),
        ({}, {"ft_tenant": "", "ft_weight": 1}),
    ],
)
def test_in_vllm_the_headers_alone_say_whose_a_request_is(headers: dict[str, str], expected: dict[str, Any]) -> None:
    seen = list[Any]()
    answer = plugin.with_tenant(lambda serving, request, raw_request: seen.append((serving, request.vllm_xargs, raw_request)))
    raw = SimpleNamespace(headers=headers)
    answer("serving", SimpleNamespace(vllm_xargs={"ft_tenant": "someone-else", "ft_weight": 1000, "own": 1}), raw)
    assert seen == [("serving", {"own": 1, **expected}, raw)]
    answer("serving", SimpleNamespace(vllm_xargs=None))
    assert seen[1] == ("serving", {"ft_tenant": "", "ft_weight": 1}, None)


@pytest.mark.parametrize(("max_loras", "of_loud"), [(1, 1), (2, 2), (4, 3), (8, 6)])
def test_in_vllm_a_tenant_with_many_adapters_does_not_keep_anothers_from_running(max_loras: int, of_loud: int) -> None:
    made, ended, numbers = Scheduler(40, max_loras=max_loras), list[str](), itertools.count()

    def flood() -> None:
        while len(made.waiting) < 30:
            number = next(numbers)
            made.waiting.add_request(asks(f"loud{number}", "loud", adapter=1 + number % max_loras))

    for _ in range(25):
        flood()
        made.step()
        assert len({r.lora_request.lora_int_id for r in made.running}) <= of_loud, "the last quarter is left to others"
    for tenant in ("quiet", "still"):
        made.waiting.add_request(asks(tenant, tenant, adapter=100 + len(tenant)))
    steps = 0
    while not {"quiet", "still"} <= set(ended):
        flood()
        ended += made.step()
        steps += 1
        assert steps < 200, "the flood goes on for as long as it comes"
    assert steps <= 10 * (4 if max_loras == 1 else 2) + 3, "an answer of the flood ends, then the other's runs"
    assert any(name.startswith("loud") for name in ended[-30:]), "and the flood goes on"
    before = len(made.waiting)
    made.waiting.remove_requests(list(made.waiting)[:5])
    assert len(made.waiting) == before - 5 == len(list(made.waiting))


def test_in_vllm_requests_for_the_base_and_for_adapters_that_run_pass_one_whose_adapter_must_wait() -> None:
    made = Scheduler(16, max_loras=1)
    made.waiting.add_request(asks("first", "a", adapter=1))
    assert made.schedule() == ["first"]
    for name, adapter in (*((f"other{n}", 2) for n in range(30)), ("same", 1), ("base", 0)):
        made.waiting.add_request(asks(name, "a", adapter=adapter))
    assert made.schedule() == ["same", "base"] and len(made.waiting) == 30, "however many they are"
    for request in made.waiting:
        request.arrival_time -= plugin.OWN_WAIT_S + 1
    made.waiting.add_request(asks("late", "a", adapter=1))
    assert made.schedule() == [], "then it passes no more, and the running answers end"
    made.running.clear()
    assert made.schedule() == [f"other{n}" for n in range(12)]
