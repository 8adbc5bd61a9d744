"""FP8 weights, adapters as GGUF files and quantized GGUF files, each read by the library that serves it; and the memory that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from core.errors import InvalidRequest
from engine.adapters import package, tensors
from engine.adapters.exports import ExportFormat, ExportPrecision, checked_export, fp8, gguf_file, llama_cpp, merge, proof
from engine.adapters.exports.gguf_adapter import write_adapter
from tests.engine.adapters.test_exports import made, order, variant, with_merges
from tests.support.models.tiny_adapter import adapter_arrays, build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.is_installed(), reason="llama-cpp-python is not installed: run make llama-cpp")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("formats") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return build_tiny_adapter(base.parent / "adapter", base, base_name="tiny")


@pytest.mark.filterwarnings("ignore:You passed .quantization_config:UserWarning")
def test_fp8_weights_are_proven_and_load_where_compressed_tensors_does(base: Path, adapter: Path, tmp_path: Path) -> None:
    built, files = made(order(base, adapter, ExportFormat.MERGED, ExportPrecision.FP8), tmp_path / "a")
    proven = built.manifest["proof"]
    assert built.manifest["before_quantization"]["mean_difference"] < 1e-4
    assert 1e-3 < proven["mean_difference"] < 0.4 < proven["adapter_effect"]
    stored = tensors.tensor_header(files / "model.safetensors")
    quantized = {name for name, info in stored.items() if info.dtype == "F8_E4M3"}
    assert len(quantized) == 7 * json.loads((files / "config.json").read_text())["num_hidden_layers"]
    assert all(stored[f"{name}_scale"].shape == (stored[name].shape[0], 1) for name in quantized)
    assert stored["lm_head.weight"].dtype == "F32"
    served = AutoModelForCausalLM.from_pretrained(files, quantization_config=CompressedTensorsConfig(dequantize=True)).eval()
    merge.merge(base, adapter, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(3, 99)[None]
    with torch.no_grad():
        wanted, found = plain(input_ids=tokens).logits, served(input_ids=tokens).logits.float()
    assert float((wanted - found).abs().mean() / wanted.std()) < 0.4


def test_a_channel_of_zeros_stays_zero_in_fp8() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -3.0]])
    scaled = weight / fp8.scale_of(weight).float()
    assert scaled[0].tolist() == [0.0, 0.0]
    assert float(scaled[1].abs().max()) == pytest.approx(fp8.LARGEST, rel=0.01)


def test_models_that_servers_arrange_otherwise_are_not_written_in_fp8(tmp_path: Path, adapter: Path) -> None:
    from tests.support.models.families import build_family

    for family, reason in (("qwen-3-moe", "mixtures of experts"), ("gemma-3", "more than a text decoder")):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            made(
                order(build_family(family, tmp_path / family), adapter, ExportFormat.MERGED, ExportPrecision.FP8),
                tmp_path / f"{family}-export",
            )
        assert refused.value.code == "fp8_not_supported"


def test_an_adapter_as_gguf_holds_what_peft_adds(tmp_path: Path) -> None:
    """Every way to scale a pair ends in the one alpha of the file; rows of Llama's queries and keys are in llama.cpp's order."""
    base = build_tiny_model(tmp_path / "base")
    config = {"use_rslora": True, "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"v_proj": 16}}
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny", config=config)
    wide = {name: array for name, array in adapter_arrays(base, rank=16).items() if ".v_proj." in name}
    save_file(adapter_arrays(base) | wide, adapter / package.ADAPTER_WEIGHTS, metadata={"format": "pt"})
    _, files = made(order(base, adapter, ExportFormat.GGUF_ADAPTER), tmp_path / "a")
    reader = gguf.GGUFReader(files / "adapter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["general.type"], fields["general.architecture"], fields["adapter.type"]) == ("adapter", "llama", "lora")
    pairs = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    adapted = {n: m for n, m in peft.base_model.model.named_modules() if hasattr(m, "get_delta_weight")}
    assert len(pairs) == 2 * len(adapted) > 4
    for name, layer in adapted.items():
        known = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
        a, b = pairs[f"{known}.lora_a"], pairs[f"{known}.lora_b"]
        delta = layer.get_delta_weight("default").detach().numpy()
        heads = {"q_proj": peft.config.num_attention_heads, "k_proj": peft.config.num_key_value_heads}.get(name.rsplit(".", 1)[-1])
        wanted = delta if heads is None else gguf_file.interleaved(delta, heads)
        np.testing.assert_allclose(b @ a * fields["adapter.lora.alpha"] / len(a), wanted, atol=1e-5, rtol=1e-4)


def test_awq_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="needs an older transformers") as refused:
        checked_export("merged", "awq")
    assert refused.value.code == "invalid_precision"
    assert checked_export("merged", "fp8") == (ExportFormat.MERGED, ExportPrecision.FP8)
    with pytest.raises(InvalidRequest, match="use f32, f16, q8_0, q4_k_m"):
        checked_export("gguf", "fp8")


@pytest.mark.skipif(llama_cpp.is_installed(), reason="llama-cpp-python is installed")
def test_without_llama_cpp_q4_k_m_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="choose q8_0") as refused:
        made(order(base, adapter, ExportFormat.GGUF, ExportPrecision.Q4_K_M), tmp_path / "a")
    assert refused.value.code == "llama_cpp_missing"


FAMILIES = [
    pytest.param({"rope_theta": 5e5}, id="llama"),
    pytest.param({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}, id="mistral"),
    pytest.param({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, id="qwen2"),
    pytest.param({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, id="qwen3"),
]


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("config", FAMILIES)
def test_llama_cpp_applies_the_adapter_file_as_peft_does(tmp_path: Path, config: dict[str, object]) -> None:
    base = variant(tmp_path / "base", start=with_merges, **config)
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny", config={"use_rslora": True})
    gguf_file.write_gguf(base, tmp_path / "base.gguf", name="base", precision=ExportPrecision.F32)
    write_adapter(adapter, json.loads((base / "config.json").read_text()), tmp_path / "adapter.gguf", name="adapter")
    wanted = proof.reference(base, adapter)
    tokens = proof.tokens_of(base).tolist()
    found = torch.from_numpy(llama_cpp.logits(tmp_path / "base.gguf", tokens, lora=tmp_path / "adapter.gguf"))
    plain = torch.from_numpy(llama_cpp.logits(tmp_path / "base.gguf", tokens))
    assert float((found - wanted.logits).abs().mean() / wanted.logits.std()) < 1e-3
    assert float((plain - wanted.logits).abs().mean() / wanted.logits.std()) > 0.1, "without the adapter it answers otherwise"


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("config", FAMILIES)
def test_llama_cpp_quantizes_to_four_bits_and_answers_from_every_precision(tmp_path: Path, config: dict[str, object]) -> None:
    base = variant(tmp_path / "base", start=with_merges, **config)
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny")
    limits = {ExportPrecision.F32: 1e-3, ExportPrecision.F16: 0.01, ExportPrecision.Q8_0: 0.1, ExportPrecision.Q4_K_M: 0.8}
    proofs = {}
    for precision, limit in limits.items():
        built, _ = made(order(base, adapter, ExportFormat.GGUF, precision), tmp_path / precision)
        proofs[precision] = built.manifest["proof"]
        assert proofs[precision]["computed_by"] == "llama.cpp"
        assert proofs[precision]["mean_difference"] < limit
    assert proofs[ExportPrecision.Q8_0]["mean_difference"] < proofs[ExportPrecision.Q4_K_M]["mean_difference"]


@pytest.mark.slow
@needs_llama_cpp
def test_q8_0_has_the_bytes_of_llama_cpp(tmp_path: Path) -> None:
    import llama_cpp as library

    base = with_merges(tmp_path / "base")
    gguf_file.write_gguf(base, tmp_path / "f32.gguf", name="base", precision=ExportPrecision.F32)
    gguf_file.write_gguf(base, tmp_path / "ours.gguf", name="base", precision=ExportPrecision.Q8_0)
    llama_cpp.quantize(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", library.LLAMA_FTYPE_MOSTLY_Q8_0)
    ours, theirs = ({t.name: t for t in gguf.GGUFReader(tmp_path / f"{of}.gguf").tensors} for of in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tensor_type == theirs[name].tensor_type, name
        assert np.array_equal(tensor.data, theirs[name].data), name


MEASURED = """
import sys
from pathlib import Path
import compressed_tensors.quantization.lifecycle.forward  # what is loaded once is not counted
import torch
from engine.adapters.exports import Precision, fp8, gguf_file, merge
from engine.training.runtime.model import decoder

base, adapter, scratch = map(Path, sys.argv[1:])

def memory(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name + ":")) // 1024

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before

def load():
    global model
    model = decoder.load(scratch / "merged", dtype=torch.bfloat16)

fp8.check_layers(base)
torch.zeros(1024, 1024) @ torch.zeros(1024, 1024)
print("merge", peak(lambda: merge.merge(base, adapter, scratch / "merged")))
print("fp8", peak(lambda: fp8.write_fp8(scratch / "merged", scratch / "fp8")))
print("read_back", peak(lambda: fp8.read_back(scratch / "fp8", scratch / "back", dtype=torch.bfloat16)))
print("gguf", peak(lambda: gguf_file.write_gguf(scratch / "merged", scratch / "m.gguf", name="m", precision=Precision.F16)))
anonymous = memory("RssAnon")
load()
print("load", memory("RssAnon") - anonymous)
"""


@pytest.mark.slow
def test_a_model_of_several_shards_is_merged_and_converted_in_a_fraction_of_its_size(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config |= {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "model.safetensors").unlink()
    _write_shards(base, config)
    size_mib = sum(file.stat().st_size for file in base.glob("*.safetensors")) / (1 << 20)
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny")
    command = [sys.executable, "-c", MEASURED, str(base), str(adapter), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = {name: int(mib) for name, mib in (line.split() for line in done.stdout.splitlines())}
    assert size_mib > 500
    assert peaks.keys() == {"merge", "fp8", "read_back", "gguf", "load"}
    assert max(peaks.values()) < 0.4 * size_mib, peaks


def _write_shards(base: Path, config: dict[str, int]) -> None:
    """Writes a shard per layer, one for embedding and head, and their index."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    rng, places = np.random.default_rng(0), {}

    def write(shard: str, shapes: dict[str, tuple[int, ...]]) -> None:
        contents = {name: ("BF16", shape) for name, shape in shapes.items()}
        # 0x3c80 to 0x3cff: numbers from 0.0156 to 0.031
        bits = lambda name: memoryview(rng.integers(0x3C80, 0x3D00, shapes[name], dtype=np.uint16)).cast("B")  # noqa: E731
        tensors.write(base / shard, contents, bits)
        places.update(dict.fromkeys(shapes, shard))

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}.self_attn.{n}_proj.weight": (width, width) for n in "qkvo"}
        shapes |= {f"{prefix}.mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (width, inner)}
        shapes |= {f"{prefix}.{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
        write(f"model-{layer:05d}.safetensors", shapes)
    vocabulary = (config["vocab_size"], width)
    write("model-last.safetensors", {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary, "model.norm.weight": (width,)})
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
