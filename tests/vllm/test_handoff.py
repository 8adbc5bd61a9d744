"""From a promotion to an answer on two replicas of the real vLLM, equal token by token to transformers with PEFT."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.serving.rollout import reconcile
from tests.vllm.customer import Customer
from tests.vllm.reference import expected_tokens
from tests.vllm.vllm_server import MAX_CPU_LORAS, SERVED, Server

log = logging.getLogger(__name__)
"""Figures: pytest --log-cli-level=INFO."""
PROMPTS = ("Hello", "How are you today?", "Count from one to ten.")
LONG = "bako rite zamu nilo pesa gudu " * 14
"""Several blocks of the prefix cache."""


def test_a_promoted_adapter_answers_on_every_replica_as_it_was_trained(customer: Customer, replicas: list[Server]) -> None:
    made = customer.promoted(seed=1)
    assert (made.observed, made.detail) == ("loaded", None)
    for server in replicas:
        for prompt in PROMPTS:
            expected = list(expected_tokens(customer.base, customer.files(made), prompt))
            assert server.tokens(made.name, prompt) == expected
            assert expected != list(expected_tokens(customer.base, None, prompt))  # it does say something else


def test_rank_and_scale_of_each_module_are_the_configs(customer: Customer, replicas: list[Server]) -> None:
    odd = customer.promoted(seed=2, rank=16, use_rslora=True, alpha_pattern={"q_proj": 4, "layers.1.mlp.up_proj": 64})
    for server in replicas:
        assert server.tokens(odd.name, "Hello") == list(expected_tokens(customer.base, customer.files(odd), "Hello"))


def test_a_rollback_brings_the_earlier_version_back(customer: Customer, replicas: list[Server]) -> None:
    first, second = customer.promoted(seed=3), customer.promoted(seed=4)
    assert first.name != second.name
    assert promotions.resolve_model(customer.platform, customer.id, first.name.rpartition(":")[0]).model == second.name
    done = promotions.rollback(customer.platform, customer.id, second.id)
    assert done.serving.id == first.id
    reconcile(customer.platform)
    for server in replicas:
        assert server.tokens(first.name, "Hello") == list(expected_tokens(customer.base, customer.files(first), "Hello"))
        assert second.name not in server.names()
        assert server.ask(second.name, "Hello").status_code == 404


def test_a_new_version_never_answers_from_the_cache_of_the_old_one(customer: Customer, replicas: list[Server]) -> None:
    """The prefix cache is keyed by name and path: neither is ever used for other weights."""
    versions = [customer.promoted(seed=seed) for seed in (5, 6)]
    expected = [list(expected_tokens(customer.base, customer.files(v), LONG)) for v in versions]
    assert expected[0] != expected[1]
    for server in replicas:
        for _ in range(2):  # the second time from the cache
            assert [server.tokens(v.name, LONG) for v in versions] == expected


def test_a_killed_replica_comes_back_with_what_it_served(customer: Customer, replicas: list[Server]) -> None:
    served = customer.promoted(seed=7)
    alive, dead = replicas
    dead.stop(kill=True)
    try:
        meanwhile = customer.promoted(seed=8)
        assert meanwhile.observed == "loaded"  # on every replica that is there
        assert alive.tokens(meanwhile.name, "Hello") == list(expected_tokens(customer.base, customer.files(meanwhile), "Hello"))
    finally:
        dead.start()
        dead.wait()
    # Before anyone tells it: it finds them in the index, and checks their bytes.
    assert dead.names() == set()
    assert dead.tokens(served.name, "Hello") == list(expected_tokens(customer.base, customer.files(served), "Hello"))
    assert served.name in dead.names()
    reconcile(customer.platform)
    assert {served.name, meanwhile.name} <= dead.names()
    assert dead.tokens(meanwhile.name, "Hello") == list(expected_tokens(customer.base, customer.files(meanwhile), "Hello"))
    assert adapters.get_adapter(customer.platform, customer.id, served.id).observed == "loaded"
    assert reconcile(customer.platform) == []


def test_base_and_adapters_in_one_batch_keep_apart(customer: Customer, replicas: list[Server]) -> None:
    made = [customer.promoted(seed=seed) for seed in (10, 11, 12)]
    models = [(SERVED, None), *((m.name, customer.files(m)) for m in made)]
    asked = [(name, files, prompt) for prompt in PROMPTS for name, files in models] * 3
    expected = [list(expected_tokens(customer.base, files, prompt)) for _, files, prompt in asked]
    with ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(lambda a: replicas[0].tokens(a[0], a[2]), asked))
    assert answered == expected


def test_more_adapters_than_a_replica_holds_are_read_again_from_directories_that_stay(customer: Customer, replicas: list[Server]) -> None:
    """A directory that is gone when its adapter is read again would take the whole engine down."""
    made = [customer.promoted(seed=20 + i) for i in range(MAX_CPU_LORAS + 2)]
    for _ in range(2):
        for adapter in made:
            expected = list(expected_tokens(customer.base, customer.files(adapter), "Hello"))
            assert replicas[0].tokens(adapter.name, "Hello") == expected
    withdrawn = made[0]
    promotions.deprecate(customer.platform, customer.id, withdrawn.id)
    assert customer.files(withdrawn).is_dir()
    reconcile(customer.platform)
    assert all(withdrawn.name not in server.names() for server in replicas)
    assert replicas[0].is_healthy()


def test_an_unload_frees_the_weights_after_the_requests_under_way(customer: Customer, replicas: list[Server]) -> None:
    made, server = customer.promoted(seed=30), replicas[0]
    expected = list(expected_tokens(customer.base, customer.files(made), "Hello", 200))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.tokens, made.name, "Hello", tokens=200)
        time.sleep(0.3)
        assert not answer.done()
        promotions.deprecate(customer.platform, customer.id, made.id)
        reconcile(customer.platform)
        assert made.name not in server.names()
        assert answer.result() == expected
    deadline = time.monotonic() + 60
    said = f"adapter '{made.name}': its weights are freed"
    while said not in server.text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert said in server.text()
    assert server.ask(made.name, "Hello").status_code == 404  # nor does the index bring it back


def test_from_a_promotion_to_an_answer_it_takes_less_than_five_seconds(customer: Customer, replicas: list[Server]) -> None:
    seconds = []
    for seed in range(40, 50):
        made = customer.register(customer.trained(seed=seed))
        started = time.monotonic()
        promotions.promote(customer.platform, customer.id, str(made.id))
        for server in replicas:
            server.tokens(str(made.name), "Hello", tokens=1)
        seconds.append(time.monotonic() - started)
        promotions.deprecate(customer.platform, customer.id, str(made.id))
        reconcile(customer.platform)
    log.info("promote to first token on two replicas: median %.3f s, most %.3f s", sorted(seconds)[5], max(seconds))
    assert max(seconds) < 5


def test_what_a_load_takes(customer: Customer, replicas: list[Server]) -> None:
    made, server = [customer.promoted(seed=60 + i) for i in range(5)], replicas[0]
    loads, first_tokens, found = [], [], []
    for adapter in made:
        server.unload(adapter.name)
        started = time.monotonic()
        assert server.load(adapter.name, customer.files(adapter)).status_code == 200
        loads.append(time.monotonic() - started)
        server.tokens(adapter.name, "Hello", tokens=1)
        first_tokens.append(time.monotonic() - started)
        server.unload(adapter.name)
        started = time.monotonic()
        server.tokens(adapter.name, "Hello", tokens=1)
        found.append(time.monotonic() - started)
    for what, seconds in (("load", loads), ("load to first token", first_tokens), ("found in the index, to first token", found)):
        log.info("%s: median %.0f ms, most %.0f ms", what, sorted(seconds)[2] * 1000, max(seconds) * 1000)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
