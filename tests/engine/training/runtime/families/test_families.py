"""A tiny model of each family trains, resumes exactly, merges, and gives an adapter that servers take; features of families are kept.

One dense family and one with experts run in `make test`, the others in `make test-all`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

import torch.distributed as dist  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from core.base_models import count_parameters  # noqa: E402
from engine.adapters import package, tensors, whole_model  # noqa: E402
from engine.adapters.exports import merge, proof  # noqa: E402
from engine.training import model_shapes  # noqa: E402
from engine.training.model_shapes.attention_kernels import Choice  # noqa: E402
from engine.training.runtime.model import (  # noqa: E402
    attention,
    decoder,
    device_metrics,
)
from engine.training.runtime.objectives import token_logps, tokens  # noqa: E402
from engine.training.runtime.run_errors import BadInput, BadSpec, PackingRefused  # noqa: E402
from engine.training.spec import LoraSettings, RunFile, TrainingSpec  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.families import FAMILIES, WINDOW, build_family  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")  # of the libraries
QUICK = ("gemma-3", "qwen-3-moe")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
LORA = replace(SPEC, lora=LoraSettings(rank=8, alpha=16, dropout=0.1), optimization=replace(SPEC.optimization, num_epochs=1, max_steps=3))
FULL = replace(LORA, adapter="full", lora=None, optimization=replace(LORA.optimization, learning_rate=1e-3))


@dataclass(frozen=True, kw_only=True)
class Bench:
    name: str
    root: Path
    base: Path
    pack: Path

    def training(self, spec: TrainingSpec, work: str) -> Training:
        run = RunFile(spec=spec, attempt=1, base_model_dir=self.base, pack_dir=self.pack, work_dir=self.root / work)
        return Training(run_file=run)

    def finished(self, spec: TrainingSpec, work: str) -> Path:
        """Trains to the end; returns the directory of the result."""
        assert self.training(spec, work).attempt()
        return self.root / work / "final"


def bench(name: str, root: Path, **changes: Any) -> Bench:
    base = build_family(name, root / "base", **changes)
    return Bench(name=name, root=root, base=base, pack=write_pack(root / "pack", examples=None if FAMILIES[name].packs else 1))


def logits(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def some_ids() -> Any:
    return torch.randint(3, 240, (2, 4 * WINDOW), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", EVERY)
def test_an_adapter_of_any_family_resumes_exactly_is_servable_and_merges(name: str, tmp_path: Path) -> None:
    made = bench(name, tmp_path)
    final = made.finished(LORA, "whole")
    cut = made.training(LORA, "cut")
    assert not cut.attempt(stop_at_poll=5) and cut.attempt()
    assert cut.details[-1]["resumed_from"] and cut.details[-1]["self_test"]["worst"] <= 1e-5
    assert (cut.details[-1]["self_test"]["boundaries"] > 0) == FAMILIES[name].packs
    assert cut.final() == {p.name: p.read_bytes() for p in sorted(final.iterdir()) if p.name != "manifest.json"}

    assert (
        package.verify_package(_served(final, tmp_path / "package"), base_shapes=tensors.module_shapes(made.base), served_name="tiny") == []
    )
    adapter = load_file(final / "adapter_model.safetensors")
    assert all(float(tensor.abs().max()) > 0 for tensor in adapter.values()), "a matrix has not been trained"
    shape = model_shapes.shape_of(name, directory=made.base)
    assert sum(t.numel() for t in adapter.values()) == shape.lora_parameters(8)

    wanted = proof.reference(made.base, final)
    assert wanted.effect > 0.01, "the adapter changes nothing"
    merge.merge(made.base, final, tmp_path / "merged")
    found = proof.prove(wanted, tmp_path / "merged", stored="F32")
    assert found.mean_difference < wanted.effect / 100


def _served(final: Path, target: Path) -> Path:
    """Returns the files of the adapter that a server reads."""
    target.mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        (target / file).write_bytes((final / file).read_bytes())
    return target


@pytest.mark.parametrize("name", EVERY)
def test_all_parameters_of_any_family_train_resume_exactly_and_export(name: str, tmp_path: Path) -> None:
    made = bench(name, tmp_path)
    final = made.finished(FULL, "whole")
    cut = made.training(FULL, "cut")
    assert not cut.attempt(stop_at_poll=5) and cut.attempt()
    assert cut.details[-1]["resumed_from"]
    assert cut.final() == {p.name: p.read_bytes() for p in sorted(final.iterdir()) if p.name != "manifest.json"}

    assert whole_model.verify_whole_model(final, base_dir=made.base) == []
    merge.merge(made.base, final, tmp_path / "export")
    before, after = decoder.load(made.base), decoder.load(tmp_path / "export")
    assert (logits(after, some_ids()) - logits(before, some_ids())).abs().max() > 1e-3
    trained = {id(p) for module in (decoder.text_decoder(after), _head(after)) for p in module.parameters()}
    old = dict(before.named_parameters())
    for parameter_name, parameter in after.named_parameters():
        is_frozen = id(parameter) not in trained or decoder.is_router(parameter_name)
        assert torch.equal(parameter, old[parameter_name]) == is_frozen, parameter_name


@pytest.mark.parametrize("name", EVERY)
def test_the_counted_parameters_of_any_family_are_those_of_its_weights(name: str, tmp_path: Path) -> None:
    made = build_family(name, tmp_path / "base")
    total = count_parameters(made)
    assert model_shapes.shape_of(name, directory=made, num_parameters=total).num_parameters == total
    model = decoder.load(made)
    text = {id(p): p.numel() for m in (decoder.text_decoder(model), _head(model)) for p in m.parameters()}
    shape = model_shapes.shape_of(name, directory=made)
    assert shape.decoder_parameters == sum(text.values())
    assert sorted(shape.adapter_modules) == sorted({target.rpartition(".")[2] for target in decoder.linear_layers(model)})


def _head(model: Any) -> Any:
    return decoder.text_model(model).get_output_embeddings()


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One feature whose handling is switched off, and what then happens."""

    family: str
    off: Callable[[pytest.MonkeyPatch], None]
    refused: type[Exception]
    because: str


def _bare_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_logps, "head_of", lambda text, backbone: text.get_output_embeddings())


def _as_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "chosen", lambda wanted, *_, **__: Choice(kernel=wanted, reason="as asked"))


def _masks_of_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder, "WITHOUT_POSITIONS", frozenset())


def _no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tokens, "max_packed_len", lambda config: None)


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """The run itself refuses."""


SWITCHES = {
    "a cap on the logits": Switch(family="gemma-2", off=_bare_head, refused=PackingRefused, because="own logits"),
    "a scale of the logits": Switch(family="granite-3", off=_bare_head, refused=PackingRefused, because="own logits"),
    "caps in attention": Switch(family="gemma-2", off=_as_asked, refused=BadInput, because="scaled_dot_product_attention"),
    "sinks": Switch(family="gpt-oss", off=_as_asked, refused=BadInput, because="scaled_dot_product_attention"),
    "masks of packed windows": Switch(family="gpt-oss", off=_masks_of_its_own, refused=PackingRefused, because="see each other"),
    "a state": Switch(family="qwen-3.5", off=_no_limit, refused=PackingRefused, because="see each other"),
    "a state, as it is": Switch(family="qwen-3.5", off=_nothing, refused=PackingRefused, because="set packing to false$"),
    "chunks": Switch(family="llama-4", off=_no_limit, refused=PackingRefused, because="exceeds"),
    "chunks, as they are": Switch(family="llama-4", off=_nothing, refused=PackingRefused, because=f"max_seq_len to at most {WINDOW}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", SWITCHES)
def test_a_run_is_refused_if_the_handling_of_a_feature_is_switched_off(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = SWITCHES[feature]
    made = replace(bench(switch.family, tmp_path), pack=write_pack(tmp_path / "packed"))
    switch.off(monkeypatch)
    with pytest.raises(switch.refused, match=switch.because):
        made.training(LORA, "work").attempt()


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary scaling": ("llama-3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "a window": ("mistral-7b", {"sliding_window": None}),
    "windows in some layers": ("gemma-3", {"sliding_window": 512}),
    "caps in attention": ("gemma-2", {"attn_logit_softcapping": None}),
    "a cap on the logits": ("gemma-2", {"final_logit_softcapping": None}),
    "a scale of queries": ("gemma-3-text", {"query_pre_attn_scalar": 64}),
    "a scale of attention": ("granite-3", {"attention_multiplier": 1.0}),
    "a scale of the logits": ("granite-3", {"logits_scaling": 1.0}),
    "chosen experts": ("qwen-3-moe", {"num_experts_per_tok": 1}),
    "windows before full attention": ("gpt-oss", {"sliding_window": 512}),
    "chunks": ("llama-4", {"attention_chunk_size": 512}),
    "a scale that grows with positions": ("llama-4", {"attn_temperature_tuning": False}),
    "partial rotary positions": ("phi-4-mini", {"partial_rotary_factor": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_what_sets_a_family_apart_reaches_the_trained_loss(feature: str, tmp_path: Path) -> None:
    """The same weights without the feature give another loss: a tiny model in which it does nothing would test nothing."""
    name, without = FEATURES[feature]
    losses = []
    for root, changes in ((tmp_path / "with", {}), (tmp_path / "without", without)):
        made = bench(name, root, **changes)
        training = made.training(replace(LORA, optimization=replace(LORA.optimization, max_steps=1)), "work")
        assert training.attempt()
        losses.append(next(line["loss"] for line in training.lines() if "loss" in line))
    assert abs(losses[0] - losses[1]) > 1e-4


def changed_parts(made: Bench, **spec: Any) -> set[str]:
    """Returns which of experts, routers and others a training of all parameters changes."""
    final = made.finished(replace(FULL, **spec), "-".join(spec) or "plain")
    before, after = (dict(decoder.load(directory).named_parameters()) for directory in (made.base, _with_tokenizer(made, final)))
    return {
        "experts" if decoder.is_expert(name) else "routers" if decoder.is_router(name) else "others"
        for name, parameter in after.items()
        if not torch.equal(parameter, before[name])
    }


def _with_tokenizer(made: Bench, final: Path) -> Path:
    merge.merge(made.base, final, final / "export")
    return final / "export"


def test_experts_are_trained_and_routers_frozen_unless_chosen_otherwise(tmp_path: Path) -> None:
    made = bench("qwen-3-moe", tmp_path)
    assert changed_parts(made) == {"experts", "others"}
    assert changed_parts(made, train_experts=False) == {"others"}
    assert changed_parts(made, train_router=True) == {"experts", "routers", "others"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-3-moe", "gpt-oss", "granite-3-moe"])
def test_a_trained_router_is_balanced_by_the_models_own_loss(name: str, tmp_path: Path) -> None:
    losses = []
    for coefficient in (0.0, 2.0):
        made = bench(name, tmp_path / str(coefficient), router_aux_loss_coef=coefficient)
        training = made.training(replace(FULL, train_router=True), "work")
        assert training.attempt()
        losses.append(next(line["loss"] for line in training.lines() if "loss" in line))
    assert losses[1] - losses[0] > 1.0  # a balanced router has a loss of at least 1


def test_a_router_is_not_trained_without_the_loss_that_its_config_asks_for(tmp_path: Path) -> None:
    made = bench("llama-4", tmp_path, router_aux_loss_coef=0.001)
    with pytest.raises(BadSpec, match=r"weight 0.001, but transformers defines no such loss.*set train_router to false"):
        made.training(replace(FULL, train_router=True), "work").attempt()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_has_the_load_balancing_loss_of_the_whole_one(tmp_path: Path) -> None:
    """``fully_shard`` replaces the classes of modules."""
    base = build_family("qwen-3-moe", tmp_path / "base", router_aux_loss_coef=2.0)
    ids, found = some_ids(), []
    for sharded in (False, True):
        model = decoder.load(base).eval()
        token_logps.install(model)
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for layer in decoder.text_decoder(model).layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        found.append(float(model(input_ids=ids, score=ids, is_token=torch.ones_like(ids))["balance"]))
    assert found[0] > 2.0
    assert found[1] == found[0]


def test_an_adapter_of_a_nested_config_leaves_the_image_encoder_alone(tmp_path: Path) -> None:
    """Its encoder has projections of the same names."""
    model = decoder.load(build_family("gemma-3", tmp_path / "base"))
    targets = decoder.linear_layers(model)
    names = [name for name, _ in model.named_modules()]
    encoder = [name for name in names if "vision_tower" in name]
    assert any(name.endswith(".q_proj") for name in encoder)
    assert not any(_is_named(name, targets) for name in encoder)
    assert sum(_is_named(name, targets) for name in names) == 7 * model.config.text_config.num_hidden_layers


def _is_named(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def test_operations_are_those_of_the_decoder_and_its_head(tmp_path: Path) -> None:
    """A larger image encoder takes no operation more."""
    model = decoder.load(build_family("gemma-3", tmp_path / "base"))
    decoder.freeze(model, experts=True, router=False)
    of_text = sum(p.numel() for p in decoder.text_decoder(model).parameters())  # its head is tied
    assert of_text < sum(p.numel() for p in model.parameters())
    assert device_metrics.flops_per_token(model) == 6 * of_text
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=decoder.linear_layers(model)))
    adapter = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    assert device_metrics.flops_per_token(lora) == 4 * of_text + 6 * adapter


def test_a_layer_that_the_base_lacks_cannot_be_a_target(tmp_path: Path) -> None:
    made = bench("phi-4", tmp_path)
    spec = replace(LORA, lora=LoraSettings(rank=8, alpha=16, target_modules=("q_proj",)))
    with pytest.raises(BadSpec, match=r"names q_proj.*it has down_proj, gate_up_proj, o_proj, qkv_proj"):
        made.training(spec, "work").attempt()


def test_a_merge_with_an_adapter_is_what_peft_computes(tmp_path: Path) -> None:
    """The proof of exports itself sees a nested model's text decoder."""
    made = bench("gemma-3", tmp_path)
    final = made.finished(LORA, "work")
    merge.merge(made.base, final, tmp_path / "merged")
    beside = PeftModel.from_pretrained(decoder.load(made.base), str(final))
    torch.testing.assert_close(logits(decoder.load(tmp_path / "merged"), some_ids()), logits(beside, some_ids()), atol=1e-4, rtol=1e-4)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "gemma3"
