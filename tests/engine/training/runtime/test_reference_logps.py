"""Reference log-probabilities equal those of TRL and of a plain forward pass, are computed once, and survive damage and kills."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.data.packs.manifest import PackManifest  # noqa: E402
from engine.training.reference_logps import partial_name, reference_key, verify  # noqa: E402
from engine.training.runtime import reference  # noqa: E402
from engine.training.runtime.run_errors import BadInput, BadSpec  # noqa: E402
from engine.training.spec import Quantization  # noqa: E402
from tests.engine.training.preference_packs import build_judged, build_preferences  # noqa: E402
from tests.support.models.reference_rows import load_logps  # noqa: E402
from tests.support.models.tiny_adapter import build_tiny_adapter  # noqa: E402
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

REPOSITORY = Path(__file__).parents[4]
COMPUTE = """
import logging, sys
from pathlib import Path
from engine.training.runtime import reference
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
reference.compute(*map(Path, sys.argv[1:4]), base_digest="d", precision="fp32", attention="sdpa", batch_tokens=400)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pack(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pack")
    build_preferences(directory, base)
    return directory


def compute(pack: Path, base: Path, out: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"base_digest": "d", "precision": "fp32", "attention": "sdpa", **changes}
    return reference.compute(pack, base, out, **settings)


@pytest.fixture(scope="module")
def whole(pack: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference")
    compute(pack, base, out)
    return out


def pairs_of(pack: Path) -> tuple[list[str], list[dict[str, Any]]]:
    manifest = PackManifest.read(pack)
    assert manifest.validation is not None
    names = [s["name"] for s in (*manifest.shards, *manifest.validation["shards"])]
    return names, [row for name in names for row in pq.read_table(pack / name).to_pylist()]


def found(out: Path, pack: Path) -> NDArray[np.float64]:
    """(pairs, 2): chosen and rejected."""
    table = load_logps(out, verify(out), pairs_of(pack)[0])
    return np.stack([table["chosen_logp"].to_numpy(), table["rejected_logp"].to_numpy()], axis=1).astype(np.float64)


def model_of(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()


def plain_logps(model: Any, rows: list[dict[str, Any]], prefixes: tuple[str, ...]) -> NDArray[np.float64]:
    """(rows, prefixes): each sequence alone, by transformers' own forward pass."""
    out = []
    for row in rows:
        for prefix in prefixes:
            ids, labels = (torch.tensor([row[f"{prefix}{what}"]]) for what in ("input_ids", "labels"))
            with torch.no_grad():
                logps = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            out.append(float(logps[labels[:, 1:] != -100].double().sum()))
    return np.asarray(out).reshape(-1, len(prefixes))


def test_they_equal_a_plain_forward_pass_of_each_answer_alone(pack: Path, base: Path, whole: Path) -> None:
    names, pairs = pairs_of(pack)
    assert len(names) >= 4 and len(pairs) == 60
    plain = plain_logps(model_of(base), pairs, ("chosen_", "rejected_"))
    assert len(np.unique(plain.round(3))) > 100  # guards against values that are all alike
    np.testing.assert_allclose(found(whole, pack), plain, atol=1e-4, rtol=1e-6)
    rows = load_logps(whole, verify(whole), names)["row"].to_pylist()
    assert rows == [p["row"] for p in pairs]


def test_they_equal_what_trl_computes_in_advance(pack: Path, base: Path, whole: Path) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    _, pairs = pairs_of(pack)

    def answer(pair: dict[str, Any], side: str) -> list[int]:
        """Up to the last token with loss: what a template writes after a turn is no part of it, and TRL's mask has no gaps."""
        labels = np.asarray(pair[f"{side}_labels"]) != -100
        end = int(labels.nonzero()[0][-1]) + 1
        assert labels[pair["prompt_length"] : end].all()
        ids: list[int] = pair[f"{side}_input_ids"][pair["prompt_length"] : end]
        return ids

    examples = [
        {
            "prompt_ids": p["chosen_input_ids"][: p["prompt_length"]],
            "chosen_ids": answer(p, "chosen"),
            "rejected_ids": answer(p, "rejected"),
        }
        for p in pairs
    ]
    model = model_of(base)
    add_fused_lm_head(model)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ref_model=None,
        model=model,
        ld_alpha=None,
    )
    theirs = []
    collate = DataCollatorForPreference(pad_token_id=0)
    for start in range(0, len(examples), 8):
        chosen, rejected = DPOTrainer.compute_ref_log_probs(trainer, model, collate(examples[start : start + 8]))
        theirs.append(torch.stack([chosen, rejected], dim=1).numpy())
    np.testing.assert_allclose(found(whole, pack), np.concatenate(theirs), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_the_size_of_batches_changes_nothing(pack: Path, base: Path, whole: Path, tmp_path: Path, batch_tokens: int) -> None:
    compute(pack, base, tmp_path, batch_tokens=batch_tokens)
    np.testing.assert_allclose(found(tmp_path, pack), found(whole, pack), atol=1e-4)


def test_a_second_run_makes_no_forward_pass(pack: Path, whole: Path, tmp_path: Path) -> None:
    manifest = verify(whole)
    assert compute(pack, tmp_path / "no model here", whole) == manifest
    code = f"{COMPUTE}assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(pack), str(tmp_path), str(whole)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY)


def test_only_a_damaged_file_is_computed_again(pack: Path, base: Path, tmp_path: Path) -> None:
    manifest = compute(pack, base, tmp_path)
    stamps = {f.name: (tmp_path / f.name).stat().st_ino for f in manifest.files}
    torn = tmp_path / manifest.files[1].name
    torn.write_bytes(torn.read_bytes()[:100])
    assert compute(pack, base, tmp_path) == manifest == verify(tmp_path)
    changed = [name for name, inode in stamps.items() if (tmp_path / name).stat().st_ino != inode]
    assert changed == [torn.name] or not changed  # an inode may be given again
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(base: Path, tmp_path: Path) -> None:
    pack, out = tmp_path / "pack", tmp_path / "out"
    build_preferences(pack, base, count=600)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", COMPUTE, str(pack), str(base), str(out)]
    process = subprocess.Popen(arguments, env=env, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while len(list(out.glob("ref-*.parquet"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {p.name: p.read_bytes() for p in out.glob("ref-*.parquet")}
    with pytest.raises(Exception, match="no complete reference"):
        verify(out)
    done = subprocess.run(arguments, env=env, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    manifest = verify(out)
    assert f"{len(before)} found" in done.stdout or f"{len(before) - 1} found" in done.stdout
    assert 3 <= len(before) < len(manifest.files)
    assert {name: (out / name).read_bytes() for name in before} == before


def test_ranks_of_a_node_share_the_files(pack: Path, base: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touched = [0, 0]

    def run(rank: int) -> Any:
        def touch() -> None:
            touched[rank] += 1

        return compute(pack, base, tmp_path, rank=rank, num_ranks=2, touch=touch)

    with caplog.at_level(logging.INFO), ThreadPoolExecutor(2) as pool:
        one, other = pool.map(run, (0, 1))
    assert one == other == verify(tmp_path) and not list(tmp_path.glob(".*"))
    computed = sorted(int(m.group(1)) for m in re.finditer(r"(\d+) files computed", caplog.text))
    assert len(computed) == 2 and computed[0] >= 1 and sum(computed) == len(one.files)
    assert all(touched)
    np.testing.assert_allclose(found(tmp_path, pack), found(whole, pack), atol=1e-4)


@pytest.mark.slow
def test_a_rank_that_begins_late_leaves_no_file_out(pack: Path, base: Path, tmp_path: Path) -> None:
    begun, deadline = threading.Event(), time.monotonic() + 100.0

    def touch() -> None:
        assert time.monotonic() < deadline, "it waits for a file that no rank computes"
        if any(tmp_path.glob(partial_name(0))):
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(compute, pack, base, tmp_path, rank=0, num_ranks=2, touch=touch)
        assert begun.wait(60)
        late = compute(pack, base, tmp_path, rank=1, num_ranks=2, touch=touch)
        assert late == early.result()
    assert len(late.files) == len(pairs_of(pack)[0])


def test_ranks_that_share_copies_of_a_large_model_compute_each_file_once() -> None:
    names = [f"shard-{n:05}" for n in range(11)]
    for num_ranks in range(1, 9):
        for width in range(1, num_ranks + 1):
            shares = [reference.share(names, rank, num_ranks, width) for rank in range(num_ranks)]
            assert sorted(name for of_rank in shares for name in of_rank) == names
            working = [rank for rank, of_rank in enumerate(shares) if of_rank]
            assert working == [width * copy for copy in range(num_ranks // width)], "the GPUs of no two copies overlap"


@pytest.mark.slow
def test_a_model_split_over_two_gpus_gives_the_log_probabilities_of_one(base: Path, tmp_path: Path) -> None:
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name="tiny-base")
    command = [sys.executable, "-m", "tests.engine.training.runtime.split_reference", str(base), str(adapter)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=150)
    assert ran.returncode == 0, ran.stderr[-2000:]
    split = json.loads(ran.stdout)
    for one, two in split.values():
        assert one == two and len(set(one)) == 4
    assert split["base"] != split["adapter"]


def test_what_cannot_be_computed_is_refused_with_the_reason(pack: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be loaded"):
        compute(pack, tmp_path / "nothing", tmp_path / "a")
    from engine.data.packs.build import PackSettings, build_pack
    from engine.data.tokens.chat_tokenizer import ChatTokenizer
    from tests.engine.data.examples_of import varied_chats

    build_pack(varied_chats(5), ChatTokenizer.load(base), PackSettings(max_seq_len=400), tmp_path / "windows", dataset_id="ds_1")
    with pytest.raises(BadSpec, match="build a preference pack"):
        compute(tmp_path / "windows", base, tmp_path / "c")


def judged_logps(out: Path, pack: Path) -> NDArray[np.float64]:
    """(answers, 2): the answer and the one of another prompt."""
    table = load_logps(out, verify(out), pairs_of(pack)[0])
    return np.stack([table["logp"].to_numpy(), table["kl_logp"].to_numpy()], axis=1).astype(np.float64)


def test_judged_answers_are_scored_with_those_of_other_prompts(base: Path, tmp_path: Path) -> None:
    pack, out = tmp_path / "pack", tmp_path / "out"
    build_judged(pack, base)
    manifest = compute(pack, base, out)
    names, rows = pairs_of(pack)
    assert manifest.kind == "judged" and len(names) >= 4 and len(rows) == 60
    np.testing.assert_allclose(judged_logps(out, pack), plain_logps(model_of(base), rows, ("", "kl_")), atol=1e-4, rtol=1e-6)
    assert load_logps(out, manifest, names)["row"].to_pylist() == [r["row"] for r in rows]
    assert compute(pack, tmp_path / "no model here", out) == manifest


QUANTIZED = """
import json, sys
from engine.training.runtime import reference
from engine.training.spec import Quantization
from tests.engine.training.runtime.test_reference_logps import Path, pairs_of, plain_logps, torch
from engine.training.runtime.model.weights import keep_layout
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

pack, base, out = sys.argv[1:]
options = {"base_digest": "d", "precision": "fp32", "attention": "sdpa", "quantization": Quantization()}
reference.compute(Path(pack), Path(base), Path(out), **options)
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config).eval()
keep_layout(model)
print(json.dumps(plain_logps(model, pairs_of(Path(pack))[1], ("chosen_", "rejected_")).tolist()))
"""


@pytest.mark.slow
def test_a_quantized_base_is_the_reference_of_what_is_trained_so(pack: Path, base: Path, whole: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", QUANTIZED, str(pack), str(base), str(tmp_path)]  # without the modules that other tests hide
    done = subprocess.run(command, env=env, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    plain = np.asarray(json.loads(done.stdout.splitlines()[-1]))
    manifest = verify(tmp_path)
    assert manifest.quantization == "nf4-double"
    assert manifest.key == reference_key(manifest.pack_fingerprint, "d", "fp32", "sdpa", quantization=Quantization()) != verify(whole).key
    assert np.abs(plain - found(whole, pack)).max() > 0.01, "quantizing this base changes what it says"
    np.testing.assert_allclose(found(tmp_path, pack), plain, atol=1e-3, rtol=1e-4)


def adapter_on(base: Path, directory: Path) -> Path:
    """A LoRA adapter that does something, as a training leaves it, but for the files that a warm start does not fetch."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model_of(base), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(str(directory))
    files = {p.name: {"sha256": hashlib.sha256(p.read_bytes()).hexdigest(), "bytes": p.stat().st_size} for p in directory.glob("adapter*")}
    files["optimizer.pt"] = {"sha256": "0" * 64, "bytes": 1}
    (directory / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return directory


def test_with_a_warm_start_the_reference_is_the_adapter_on_the_base(pack: Path, base: Path, whole: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = adapter_on(base, tmp_path / "adapter")
    digest = hashlib.sha256((adapter / "manifest.json").read_bytes()).hexdigest()
    manifest = compute(pack, base, tmp_path / "out", start_dir=adapter)
    assert manifest.adapter == digest
    assert manifest.key == reference_key(manifest.pack_fingerprint, "d", "fp32", "sdpa", adapter=digest)
    adapted = PeftModel.from_pretrained(model_of(base), str(adapter)).eval()
    plain = plain_logps(adapted, pairs_of(pack)[1], ("chosen_", "rejected_"))
    assert np.abs(plain - found(whole, pack)).max() > 1
    np.testing.assert_allclose(found(tmp_path / "out", pack), plain, atol=1e-3, rtol=1e-5)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(BadInput, match="does not match its manifest"):
        compute(pack, base, tmp_path / "other", start_dir=adapter)
    (adapter / "manifest.json").unlink()
    with pytest.raises(BadInput, match="has no complete adapter"):
        compute(pack, base, tmp_path / "other", start_dir=adapter)


def test_with_a_whole_model_to_start_from_the_reference_is_that_model(pack: Path, base: Path, whole: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", seed=7)
    listed = {p.name: {"sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in model.iterdir()}
    (model / "manifest.json").write_text(json.dumps({"format": 1, "files": listed}))
    manifest = compute(pack, base, tmp_path / "out", start_dir=model)
    assert manifest.adapter == hashlib.sha256((model / "manifest.json").read_bytes()).hexdigest()
    plain = plain_logps(model_of(model), pairs_of(pack)[1], ("chosen_", "rejected_"))
    assert np.abs(plain - found(whole, pack)).max() > 1, "another model than the base"
    np.testing.assert_allclose(found(tmp_path / "out", pack), plain, atol=1e-3, rtol=1e-5)
    (model / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(BadInput, match=r"model\.safetensors does not match its manifest"):
        compute(pack, base, tmp_path / "other", start_dir=model)
