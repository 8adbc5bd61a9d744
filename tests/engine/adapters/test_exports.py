"""Exports answer as base and adapter do: seen by libraries that had no part in making them."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.errors import FtError, IntegrityError, InvalidRequest
from engine.adapters import package
from engine.adapters.exports import ExportFormat, ExportPrecision, checked_export, export_key, gguf_file, merge, proof
from engine.adapters.exports.archive import BuiltExport, ExportOrder, build_export, unpack_export
from engine.adapters.exports.gguf_file import interleaved, llama3_factors, plain_template
from engine.evals.run.run_status import EVAL_EXIT_INTERNAL, RESULT_NAME
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import CHAT_TEMPLATE, SPECIAL, build_tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed: it reads no tokenizer without merges, as these models have. test_export_formats.py tries it."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)


def order(base_dir: Path, adapter_dir: Path, format: ExportFormat, precision: ExportPrecision | None = None, **changes: Any) -> ExportOrder:
    told = {"id": "tiny", "repo": "local", "revision": "r", "digest": "d", "license": "Apache-2.0"}
    values = {
        "base_dir": base_dir,
        "adapter_dir": adapter_dir,
        "name": "ft:tiny:acme:x:1",
        "adapter": {"id": "adp-1"},
        "base": told,
        **changes,
    }
    return ExportOrder(format=format, precision=precision, **values)


def made(wanted: ExportOrder, scratch: Path) -> tuple[BuiltExport, Path]:
    scratch.mkdir(parents=True)
    built = build_export(wanted, scratch)
    unpack_export(built.archive, scratch / "unpacked")
    return built, scratch / "unpacked"


def variant(directory: Path, *, start: Callable[[Path], Path] = build_tiny_model, **config: Any) -> Path:
    """The tiny model, as `start` makes it, as another architecture, with what that has beyond Llama."""
    start(directory)
    body = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(body))
    weights, rng = load_file(directory / "model.safetensors"), np.random.default_rng(3)
    for layer in range(body["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        if body["model_type"] == "qwen2" or body.get("attention_bias"):
            for name in ("q", "k", "v", *(["o"] if body["model_type"] == "llama" else [])):
                rows = len(weights[f"{prefix}.{name}_proj.weight"])
                weights[f"{prefix}.{name}_proj.bias"] = rng.standard_normal(rows).astype(np.float32)
        if body["model_type"] == "qwen3":
            for name in ("q", "k"):
                weights[f"{prefix}.{name}_norm.weight"] = 1 + rng.standard_normal(16).astype(np.float32) * 0.2
    if body["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("exports") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return build_tiny_adapter(base.parent / "adapter", base, base_name="tiny")


def test_merged_weights_are_proven_and_load_without_us(base: Path, adapter: Path, tmp_path: Path) -> None:
    built, files = made(order(base, adapter, ExportFormat.MERGED), tmp_path / "a")
    proven = built.manifest["proof"]
    assert proven["mean_difference"] < 1e-4
    assert proven["adapter_effect"] > 0.1, "an adapter that does nothing would prove nothing"
    loaded = AutoModelForCausalLM.from_pretrained(files)
    assert loaded.num_parameters() > 100_000
    assert AutoTokenizer.from_pretrained(files).chat_template == CHAT_TEMPLATE
    assert {n: e["bytes"] for n, e in built.manifest["files"].items()} == {
        p.name: p.stat().st_size for p in files.iterdir() if p.name != "manifest.json"
    }


def test_a_proof_frees_the_weights_that_it_loaded_without_the_collector(base: Path, adapter: Path, tmp_path: Path) -> None:
    def num_held() -> int:
        return sum(t.numel() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type != "meta")

    merge.merge(base, adapter, tmp_path / "merged")
    gc.disable()
    try:
        before = num_held()
        wanted = proof.reference(base, adapter)
        proof.prove(wanted, tmp_path / "merged", stored="F32")
        assert num_held() - before == wanted.logits.numel()
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_same_order_gives_the_same_bytes(base: Path, adapter: Path, tmp_path: Path) -> None:
    first, again = (made(order(base, adapter, ExportFormat.MERGED), tmp_path / name)[0] for name in "ab")
    assert first.archive.read_bytes() == again.archive.read_bytes()


def test_ranks_and_scales_of_single_modules_are_those_of_the_library(base: Path, tmp_path: Path) -> None:
    config = {"use_rslora": True, "alpha_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 40}}
    other = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny", config=config)
    assert made(order(base, other, ExportFormat.MERGED), tmp_path / "a")[0].manifest["proof"]["mean_difference"] < 1e-4


def test_weights_in_bfloat16_stay_so_within_their_rounding(base: Path, adapter: Path, tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "half")
    weights = {k: v.bfloat16() for k, v in load_torch(base / "model.safetensors").items()}
    save_torch(weights, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    built, files = made(order(tmp_path / "half", adapter, ExportFormat.MERGED), tmp_path / "a")
    assert {t.dtype for t in load_torch(files / "model.safetensors").values()} == {torch.bfloat16}
    assert 1e-5 < built.manifest["proof"]["mean_difference"] < 0.05


def test_an_export_that_would_answer_otherwise_is_not_handed_out(base: Path, tmp_path: Path) -> None:
    dora = build_tiny_adapter(tmp_path / "dora", base, base_name="tiny", config={"use_dora": True})
    assert made(order(base, dora, ExportFormat.MERGED), tmp_path / "a")[0].manifest["proof"]["mean_difference"] < 1e-4
    config = json.loads((dora / package.ADAPTER_CONFIG).read_text())
    (dora / package.ADAPTER_CONFIG).write_text(json.dumps({**config, "use_dora": False}))
    with pytest.raises(FtError, match="is not a LoRA matrix"):
        made(order(base, dora, ExportFormat.MERGED), tmp_path / "b")
    right = build_tiny_adapter(tmp_path / "right", base, base_name="tiny")
    wrong = build_tiny_adapter(tmp_path / "wrong", base, base_name="tiny", config={"lora_alpha": 12})
    merge.merge(base, wrong, tmp_path / "merged")
    with pytest.raises(FtError, match="output differs") as unfaithful:
        proof.prove(proof.reference(base, right), tmp_path / "merged", stored="F32")
    assert unfaithful.value.code == "export_not_faithful"


@pytest.mark.parametrize(
    ("config", "read_alone"),
    [
        pytest.param({"rope_theta": 5e5}, True, id="llama"),
        pytest.param({"attention_bias": True}, False, id="llama with biases"),
        pytest.param({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}, False, id="mistral"),
        pytest.param({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, True, id="qwen2"),
        pytest.param({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, False, id="qwen3"),
        pytest.param({"tie_word_embeddings": True}, True, id="tied"),
    ],
)
def test_a_gguf_file_answers_as_base_and_adapter(tmp_path: Path, config: dict[str, Any], read_alone: bool) -> None:
    """`read_alone`: the library's reader finds all that it needs in the file, and takes nothing from a config beside it."""
    base = variant(tmp_path / "base", **config)
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny")
    built, files = made(order(base, adapter, ExportFormat.GGUF, ExportPrecision.F32), tmp_path / "a")
    assert built.manifest["proof"]["mean_difference"] < 1e-4
    if read_alone:
        whole = AutoModelForCausalLM.from_pretrained(files, gguf_file="model-f32.gguf", dtype=torch.float32).eval()
        merge.merge(base, adapter, tmp_path / "merged")
        tokens = torch.arange(3, 99)[None]
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()(input_ids=tokens).logits
            assert torch.allclose(whole(input_ids=tokens).logits, expected, atol=2e-3)


def with_merges(directory: Path, *, sentencepiece: bool = False) -> Path:
    """The tiny model with a tokenizer that merges, and the rows that its tokens need."""
    build_tiny_model(directory)
    words = ["Hello, world! The quick brown fox jumps over 12345 lazy dogs. Zwölf Boxkämpfer jagen Viktor quer."] * 4
    special = [AddedToken(s, special=True, normalized=False) for s in SPECIAL]
    if sentencepiece:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [AddedToken(f"<0x{i:02X}>", special=False, normalized=False) for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["<unk>", *alphabet], show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(next(iter(gguf_file.SPLITS))), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    if sentencepiece:  # bytes are ordinary tokens in such models
        body = json.loads((directory / "tokenizer.json").read_text())
        body["added_tokens"] = [t for t in body["added_tokens"] if not t["content"].startswith("<0x")]
        (directory / "tokenizer.json").write_text(json.dumps(body))
    rows = tokenizer.get_vocab_size() + 4
    weights = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = np.random.default_rng(9).standard_normal((rows - len(weights[name]), weights[name].shape[1])).astype(np.float32) * 0.3
        weights[name] = np.concatenate([weights[name], more])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    eos = tokenizer.token_to_id("<|im_end|>")
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": rows, "eos_token_id": eos, "pad_token_id": eos}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_the_files_tokens_are_those_of_the_model(adapter: Path, tmp_path: Path, sentencepiece: bool) -> None:
    base = with_merges(tmp_path / "base", sentencepiece=sentencepiece)
    _, files = made(order(base, adapter, ExportFormat.GGUF, ExportPrecision.F16), tmp_path / "a")
    fields = gguf.GGUFReader(files / "model-f16.gguf").fields
    ours = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokens = [bytes(fields["tokenizer.ggml.tokens"].parts[i]).decode() for i in fields["tokenizer.ggml.tokens"].data]
    types = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
    assert tokens[: ours.get_vocab_size()] == [ours.id_to_token(i) for i in range(ours.get_vocab_size())]
    assert [tokens[i] for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL] == list(SPECIAL)
    assert types[ours.get_vocab_size() :] == [gguf.TokenType.UNUSED] * 4
    assert types.count(gguf.TokenType.BYTE) == (256 if sentencepiece else 0)
    pre = bytes(fields["tokenizer.ggml.pre"].parts[fields["tokenizer.ggml.pre"].data[0]]).decode()
    assert pre == ("default" if sentencepiece else "llama-bpe")
    assert int(fields["tokenizer.ggml.eos_token_id"].parts[-1][0]) == ours.token_to_id("<|im_end|>")
    if not sentencepiece:
        theirs = AutoTokenizer.from_pretrained(files, gguf_file="model-f16.gguf")
        for text in ("Hello, world!", "Zwölf Boxkämpfer 12345", "  tabs\tand  spaces "):
            assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).ids


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit", "share"), [(ExportPrecision.F16, 0.01, 0.55), (ExportPrecision.Q8_0, 0.1, 0.4)])
def test_coarser_files_are_smaller_and_say_what_they_cost(
    base: Path, adapter: Path, tmp_path: Path, precision: ExportPrecision, limit: float, share: float
) -> None:
    whole, _ = made(order(base, adapter, ExportFormat.GGUF, ExportPrecision.F32), tmp_path / "a")
    coarse, _ = made(order(base, adapter, ExportFormat.GGUF, precision), tmp_path / "b")
    assert coarse.archive.stat().st_size < share * whole.archive.stat().st_size
    assert 0 < coarse.manifest["proof"]["mean_difference"] < limit


def test_what_gguf_cannot_say_is_refused_before_anything_is_computed(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "gpt")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    with pytest.raises(InvalidRequest, match="'gpt_neox'") as refused:
        made(order(other, adapter, ExportFormat.GGUF, ExportPrecision.F16), tmp_path / "a")
    assert refused.value.code == "gguf_not_supported"
    odd = with_merges(tmp_path / "odd")
    tokenizer = json.loads((odd / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    (odd / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidRequest, match="Punctuation, Split, ByteLevel"):
        made(order(odd, adapter, ExportFormat.GGUF, ExportPrecision.F16), tmp_path / "b")


def test_an_adapter_names_its_bases_repository_and_the_tokenizer_comes_alone(base: Path, adapter: Path, tmp_path: Path) -> None:
    hub = {"id": "acme/tiny", "repo": "acme/Tiny-0.2", "revision": "0" * 40, "digest": "d", "license": "mit"}
    _, files = made(order(base, adapter, ExportFormat.ADAPTER, base=hub), tmp_path / "a")
    config = json.loads((files / package.ADAPTER_CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("acme/Tiny-0.2", "0" * 40)
    assert (files / package.ADAPTER_WEIGHTS).read_bytes() == (adapter / package.ADAPTER_WEIGHTS).read_bytes()
    card = (files / "README.md").read_text()
    assert 'license: "mit"' in card
    assert 'base_model: "acme/Tiny-0.2"' in card
    _, tokenizer = made(order(base, adapter, ExportFormat.TOKENIZER), tmp_path / "t")
    assert {p.name for p in tokenizer.iterdir()} == {"README.md", "manifest.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.slow
def test_a_full_model_is_taken_over_as_it_is(base: Path, tmp_path: Path) -> None:
    full = build_tiny_model(tmp_path / "full", seed=5)
    config = {**json.loads((full / "config.json").read_text()), "dtype": "float32"}
    (full / "config.json").write_text(json.dumps(config))
    for form in (ExportFormat.MERGED, ExportFormat.ADAPTER):
        _, files = made(order(base, full, form), tmp_path / form)
        assert (files / "model.safetensors").read_bytes() == (full / "model.safetensors").read_bytes()
        assert json.loads((files / "config.json").read_text()) == config, "its own: the base may be stored in another type"
        assert "The weights of a fine-tuning job." in (files / "README.md").read_text()
    built, files = made(order(base, full, ExportFormat.GGUF, ExportPrecision.F32), tmp_path / "gguf")
    assert (files / "model-f32.gguf").is_file()
    assert built.manifest["proof"]["mean_difference"] < 1e-3


def test_rows_of_a_head_are_put_side_by_side() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleaved(rows[:, 0], 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_frequencies_of_llama_3_are_divided_as_the_library_divides_them() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    ours = llama3_factors(rope, 5e5, 128, 131072)
    assert torch.allclose(plain / torch.from_numpy(ours), theirs, rtol=1e-5)


def test_the_template_renders_the_same_without_the_trainers_marks() -> None:
    plain = plain_template(CHAT_TEMPLATE)
    assert "generation %}" not in plain
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    import jinja2

    rendered = jinja2.Environment().from_string(plain).render(messages=messages, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("format", "precision", "code"),
    [("onnx", None, "invalid_format"), ("merged", "f16", "invalid_precision"), ("gguf", "q2_k", "invalid_precision")],
)
def test_forms_that_are_not_made_are_refused(format: str, precision: str | None, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_export(format, precision)
    assert refused.value.code == code


def test_an_export_is_named_by_all_that_it_is_made_of() -> None:
    keys = {
        export_key(m, b, f, p)
        for m in "ab"
        for b in "cd"
        for f, p in ((ExportFormat.GGUF, ExportPrecision.F16), (ExportFormat.GGUF, ExportPrecision.Q8_0))
    }
    assert len(keys) == 8
    assert checked_export("gguf", None) == (ExportFormat.GGUF, ExportPrecision.F16)


def test_a_process_that_crashes_does_not_report_the_error_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / RESULT_NAME).write_text('{"error": {"code": "earlier"}}')
    (tmp_path / "run.json").write_text(json.dumps({"out_dir": str(tmp_path), "order": {}}))  # without its directories
    ended = subprocess.run([sys.executable, "-m", "engine.adapters.exports.export_runner", str(tmp_path / "run.json")], check=False)
    assert ended.returncode == EVAL_EXIT_INTERNAL
    assert not (tmp_path / RESULT_NAME).exists()


@pytest.mark.parametrize(
    "member",
    [
        {"name": "../outside"}, {"name": "/tmp/outside"}, {"name": "sub/file"}, {"name": ".."}, {"name": "sub", "type": tarfile.DIRTYPE},
        {"name": "link", "type": tarfile.SYMTYPE, "linkname": "good"}, {"name": "link", "type": tarfile.LNKTYPE, "linkname": "good"},
        {"name": "pipe", "type": tarfile.FIFOTYPE}, {"name": "device", "type": tarfile.CHRTYPE},
    ],
    ids=lambda member: f"{member['name']} {member.get('type', b'').decode()}",
)  # fmt: skip
def test_an_archive_with_more_than_plain_files_is_refused(member: dict[str, Any], tmp_path: Path) -> None:
    archive, bad = tmp_path / "a.tar", tarfile.TarInfo(member["name"])
    for name, value in member.items():
        setattr(bad, name, value)
    good = tarfile.TarInfo("good")
    good.size = 2
    with tarfile.open(archive, "w") as tar:
        tar.addfile(good, io.BytesIO(b"ok"))
        tar.addfile(bad)
    with pytest.raises(IntegrityError, match="which is no plain file at its top") as refused:
        unpack_export(archive, tmp_path / "out")
    assert refused.value.code == "export_damaged"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "good", "out"]


def test_a_file_that_an_archive_holds_twice_does_not_replace_the_first(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for body in (b"first", b"other"):
            info = tarfile.TarInfo("same")
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    with pytest.raises(IntegrityError, match="or is there twice"):
        unpack_export(tmp_path / "a.tar", tmp_path / "out")
    assert (tmp_path / "out" / "same").read_bytes() == b"first"
