"""What rsLoRA, DoRA and PiSSA train is what PEFT trains, and what is saved gives the same answers on the unchanged base."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, set_seed  # noqa: E402

from engine.adapters import package, servability, tensors  # noqa: E402
from engine.adapters.exports import merge  # noqa: E402
from engine.training.data_order import DataOrder  # noqa: E402
from engine.training.spec import LoraSettings, Optimization, Quantization, RunFile, TrainingSpec  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.engine.training.runtime.test_trajectory import examples, mean_loss  # noqa: E402
from tests.support.models.deterministic_torch import deterministic_only_here  # noqa: E402, F401
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
OPTIMIZATION = Optimization(
    learning_rate=2e-3, num_epochs=1, per_device_batch_size=2, accumulation_steps=2, schedule="constant", warmup_ratio=0.0
)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    return build_tiny_model(root / "base"), write_pack(root / "pack", validation=0)


def trained(files: tuple[Path, Path], work: Path, *, spec: TrainingSpec = SPEC, **lora: Any) -> Training:
    base, pack = files
    settings = LoraSettings(**{"rank": 4, "alpha": 8, "dropout": 0.0} | lora)
    given = replace(spec, lora=settings, optimization=OPTIMIZATION, checkpoint=replace(SPEC.checkpoint, every_steps=100))
    run = Training(run_file=RunFile(spec=given, attempt=1, base_model_dir=base, pack_dir=pack, work_dir=work))
    assert run.attempt()
    return run


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> Any:
    return model.eval()(input_ids=torch.arange(3, 53)[None]).logits


def of_peft(files: tuple[Path, Path], **config: Any) -> tuple[Any, list[float]]:
    """PEFT's model after the run's steps in a plain loop over its examples, and their losses."""
    base, pack = files
    set_seed(SPEC.seed)
    model: Any = get_peft_model(load(base), LoraConfig(target_modules=MODULES, task_type="CAUSAL_LM", **config)).train()
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=OPTIMIZATION.learning_rate, weight_decay=0.0)
    order = DataOrder(shard_rows=(21,), seed=SPEC.seed, per_device_batch_size=2, accumulation_steps=2)
    losses = []
    for step in range(STEPS):
        loss = mean_loss(model, examples(pack, order.step(step).tolist()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def losses(run: Training) -> list[float]:
    return [line["loss"] for line in run.lines() if "loss" in line]


def served(base: Path, run: Training) -> Any:
    return logits(PeftModel.from_pretrained(load(base), str(run.run_file.work_dir / "final")))


def merged(base: Path, run: Training, target: Path) -> Any:
    merge.merge(base, run.run_file.work_dir / "final", target)
    return logits(load(target))


def refusals(base: Path, run: Training) -> set[str]:
    final = run.run_file.work_dir / "final"
    made = final.parent / "package"
    package.write_package(final, made, served_name="tiny", base_digest="0")
    return {r.code for r in package.verify_package(made, base_shapes=tensors.module_shapes(base), served_name="tiny")}


def test_the_scale_of_rslora_is_alpha_by_the_root_of_the_rank(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = files
    run = trained(files, tmp_path / "rslora", rank=16, alpha=8, use_rslora=True)
    same = trained(files, tmp_path / "lora", rank=16, alpha=32)
    assert run.trajectory() == same.trajectory(), "8 / sqrt(16) is 32 / 16"
    assert run.final()["adapter_model.safetensors"] == same.final()["adapter_model.safetensors"]
    assert losses(run) != losses(trained(files, tmp_path / "plain", rank=16, alpha=8))
    config = json.loads(run.final()["adapter_config.json"])
    assert (config["use_rslora"], config["lora_alpha"], servability.scale_of(config, "q_proj")) == (True, 8, 2.0)
    torch.testing.assert_close(merged(base, run, tmp_path / "merged"), served(base, run), atol=1e-5, rtol=1e-4)
    assert refusals(base, run) == set(), "vLLM reads use_rslora from the config"


def test_dora_trains_as_in_peft_and_can_be_merged_but_not_served(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = files
    run = trained(files, tmp_path / "dora", rank=8, use_dora=True)
    peft, expected = of_peft(files, r=8, lora_alpha=8, use_dora=True)
    assert losses(run) == pytest.approx(expected, rel=1e-4)
    assert losses(run)[1:] != pytest.approx(losses(trained(files, tmp_path / "lora", rank=8))[1:], rel=1e-4), "magnitudes are trained"
    torch.testing.assert_close(served(base, run), logits(peft), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(merged(base, run, tmp_path / "merged"), served(base, run), atol=1e-5, rtol=1e-4)
    assert refusals(base, run) == {"needs_merge"}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_pissa_trains_as_in_peft_and_ends_as_an_ordinary_adapter(files: tuple[Path, Path], tmp_path: Path, use_rslora: bool) -> None:
    base, _ = files
    run = trained(files, tmp_path / "pissa", init_lora_weights="pissa", use_rslora=use_rslora)
    peft, expected = of_peft(files, r=4, lora_alpha=8, init_lora_weights="pissa", use_rslora=use_rslora)
    assert losses(run) == pytest.approx(expected, rel=1e-4)
    assert losses(run)[1:] != pytest.approx(losses(trained(files, tmp_path / "lora", use_rslora=use_rslora))[1:], rel=1e-4)
    torch.testing.assert_close(served(base, run), logits(peft), atol=1e-3, rtol=1e-3)
    config = json.loads(run.final()["adapter_config.json"])
    assert (config["r"], config["init_lora_weights"]) == (8, True)
    assert refusals(base, run) == set()


def test_the_finished_adapter_of_pissa_survives_half_precision(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Servers hold adapters in bf16, where [A; A0] and [B, -B0] would lose most of the small change between them."""
    run = trained(files, tmp_path / "work", init_lora_weights="pissa_niter_8")
    raw = load_file(run.run_file.work_dir / "checkpoints" / f"step-{STEPS:08d}" / "adapter_model.safetensors")
    final = load_file(run.run_file.work_dir / "final" / "adapter_model.safetensors")

    def change(of: dict[str, Any], name: str) -> Any:
        return of[name.replace("_A.", "_B.")].float() @ of[name].float()

    for name in (n for n in final if ".lora_A." in n):
        exact = change(raw, name)
        torch.testing.assert_close(change(final, name), exact, atol=1e-6, rtol=1e-3)
        in_half = change({k: v.bfloat16() for k, v in final.items()}, name)
        assert torch.linalg.norm(in_half - exact) < 0.01 * torch.linalg.norm(exact)


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_16"])
def test_pissa_begins_with_the_largest_singular_values(how: str) -> None:
    from engine.training.runtime.model.pissa import principal_part

    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(n, 30)).Q for n in (40, 50))
    weight = left @ torch.diag(0.7 ** torch.arange(30.0)) @ right.T
    a, b = principal_part(weight, 5, how, scale=2.0)
    assert (a.shape, b.shape) == ((5, 50), (40, 5))
    torch.testing.assert_close(2.0 * b @ a, left[:, :5] @ torch.diag(0.7 ** torch.arange(5.0)) @ right[:, :5].T, atol=1e-5, rtol=1e-4)
    narrow = weight[:3]
    a, b = principal_part(narrow, 5, how, scale=2.0)
    assert (a.shape, b.shape) == ((5, 50), (3, 5)), "of the rank that the config states, whatever the matrix has"
    torch.testing.assert_close(2.0 * b @ a, narrow, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"init_lora_weights": "pissa_niter_4"}], ids=lambda lora: next(iter(lora)))
def test_a_base_in_4_bits_begins_unchanged_and_is_learned_on(files: tuple[Path, Path], tmp_path: Path, lora: dict[str, Any]) -> None:
    quantized = replace(SPEC, adapter="qlora", quantization=Quantization())
    run, plain = (trained(files, tmp_path / name, spec=quantized, **given) for name, given in (("run", lora), ("plain", {})))
    assert losses(run)[0] == pytest.approx(losses(plain)[0], rel=1e-5)
    assert losses(run)[-1] < losses(run)[0]
    assert losses(run)[1:] != pytest.approx(losses(plain)[1:], rel=1e-5)


def test_the_memory_of_dora_counts_what_it_saves(files: tuple[Path, Path]) -> None:
    from benchmarks.training.memory_cpu import TRIALS, SavedBytes, build, example
    from engine.training.memory.estimates import activation_bytes

    small = next(t.case for t in TRIALS if t.case.adapter == "lora" and t.case.method == "sft")
    counted = {}
    for use_dora in (False, True):
        case = replace(small, precision="fp32", dropout=0.05, use_dora=use_dora, gradient_checkpointing=False)
        model = build(case)
        counter = SavedBytes(model)
        with torch.autograd.graph.saved_tensors_hooks(counter, lambda tensor: tensor):
            model(**example(case), use_cache=False, fused_lm_head=True).log_probs.mean()
        counted[use_dora] = counter.total
        assert activation_bytes(case) == pytest.approx(counter.total, rel=0.06)
    assert counted[True] > 1.2 * counted[False]
