"""Rates of groups of parameters, schedules with a floor and noise on embeddings are those of the libraries that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from peft import LoraConfig, get_peft_model  # noqa: E402
from peft.optimizers import create_loraplus_optimizer  # noqa: E402
from transformers import AutoModelForCausalLM, get_scheduler  # noqa: E402
from transformers.integrations.neftune import neftune_post_forward_hook  # noqa: E402

from engine.training.runtime.model.embedding_noise import EmbeddingNoise, example_lengths  # noqa: E402
from engine.training.runtime.model.optimizers import make_optimizer, make_schedule  # noqa: E402
from engine.training.spec import Optimization  # noqa: E402
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too


def opt(**changes: Any) -> Optimization:
    given: dict[str, Any] = {"learning_rate": 0.01, "num_epochs": 1, "per_device_batch_size": 1, "accumulation_steps": 1}
    return Optimization(**given | changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


def model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def rates(optimizer: Any, model: Any) -> dict[str, tuple[float, float]]:
    """Rate and weight decay of each trained parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}


def test_the_groups_of_lora_plus_are_those_of_peft(base: Path) -> None:
    adapted = get_peft_model(model(base), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], use_dora=True))
    ours = rates(make_optimizer(adapted, opt(loraplus_lr_ratio=16.0, weight_decay=0.1)), adapted)
    theirs = create_loraplus_optimizer(adapted, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1)
    expected = rates(theirs, adapted)
    assert {name: rate for name, (rate, _) in ours.items()} == {name: rate for name, (rate, _) in expected.items()}
    assert set(ours.values()) == {(0.01, 0.1), (0.16, 0.1), (0.16, 0.0)}, "A, B, and magnitudes, which do not decay here"
    assert set(rates(make_optimizer(adapted, opt()), adapted).values()) == {(0.01, 0.0)}


def test_each_block_before_the_last_one_and_the_embedding_have_a_smaller_rate(base: Path) -> None:
    whole = model(base)
    optimizer = make_optimizer(whole, opt(layer_lr_decay=0.5))
    for name, (rate, _) in rates(optimizer, whole).items():
        block = "embed_tokens" in name, "layers.0." in name
        assert rate == {(True, False): 0.0025, (False, True): 0.005, (False, False): 0.01}[block], name
    assert optimizer.param_groups[0]["lr"] == 0.01, "which a step reports"
    adapted = get_peft_model(model(base), LoraConfig(r=2, target_modules=["q_proj"]))
    combined = rates(make_optimizer(adapted, opt(layer_lr_decay=0.5, loraplus_lr_ratio=4.0)), adapted)
    assert sorted(rate for rate, _ in combined.values()) == [0.005, 0.01, 0.02, 0.04]


@pytest.mark.parametrize("kind", ["adamw_torch", "adamw_8bit"])
def test_adam_has_the_betas_and_the_epsilon_of_the_spec(base: Path, kind: str) -> None:
    made = make_optimizer(model(base), opt(adam_betas=(0.8, 0.95), adam_epsilon=1e-5, optimizer=kind))
    assert {(group["betas"], group["eps"]) for group in made.param_groups} == {((0.8, 0.95), 1e-5)}


def multipliers(schedule: Any, optimizer: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"] / 0.01)
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_schedule_with_a_floor_falls_to_it_from_the_full_rate(kind: Any) -> None:
    steps, warmup, floor = 20, 4, 0.1
    ours, theirs = (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.01) for _ in range(2))
    schedule = make_schedule(ours, opt(schedule=kind, warmup_ratio=warmup / steps, min_lr_ratio=floor), total_steps=steps)
    found = multipliers(schedule, ours, steps)
    expected = [s / warmup if s < warmup else floor + (1 - floor) * (steps - s) / (steps - warmup) for s in range(steps + 1)]
    if kind == "cosine":
        options = {"num_warmup_steps": warmup, "num_training_steps": steps, "scheduler_specific_kwargs": {"min_lr_rate": floor}}
        expected = multipliers(get_scheduler("cosine_with_min_lr", theirs, **options), theirs, steps)
    assert found == pytest.approx(expected)
    assert (max(found), found[0], found[-1]) == pytest.approx((1.0, 0.0, floor))


def noise(hook: Any, *, length: int, training: bool = True) -> Any:
    """What the hook adds to the embeddings of ones and twos, drawn from the same seed."""
    embeddings = torch.nn.Embedding(3, 64).train(training)
    hook(embeddings)
    ids = torch.arange(length)[None] % 2 + 1
    torch.manual_seed(3)
    return (embeddings(ids) - embeddings.weight[ids]).detach()


def test_the_noise_on_the_embeddings_of_one_example_is_that_of_transformers() -> None:
    def theirs(embeddings: Any) -> None:
        embeddings.neftune_noise_alpha = 5.0
        embeddings.register_forward_hook(neftune_post_forward_hook)

    def ours(embeddings: Any) -> None:
        EmbeddingNoise(embeddings, 5.0).lengths = torch.full((1, 40), 40.0)

    found = noise(ours, length=40)
    assert 0.9 < float(found.abs().max()) / (5.0 / (40 * 64) ** 0.5) <= 1.0
    torch.testing.assert_close(found, noise(theirs, length=40), atol=1e-6, rtol=1e-4)
    assert not noise(ours, length=40, training=False).any(), "validations have none"


def test_each_example_of_a_window_has_the_noise_of_its_own_length() -> None:
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0]])
    assert example_lengths(positions).tolist() == [[3.0] * 3 + [5.0] * 5, [7.0] * 7 + [1.0]]

    def packed(embeddings: Any) -> None:
        EmbeddingNoise(embeddings, 5.0).lengths = torch.tensor([[4.0] * 4 + [400.0] * 400])

    found = noise(packed, length=404)[0].abs()
    assert 0.9 < float(found[:4].max()) / (5.0 / (4 * 64) ** 0.5) <= 1.0
    assert 0.9 < float(found[4:].max()) / (5.0 / (400 * 64) ** 0.5) <= 1.0
