"""Log-probabilities of labelled tokens are those of the model's own logits, whatever its family does to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

import transformers  # noqa: E402

from engine.training.runtime.objectives import token_logps  # noqa: E402
from engine.training.spec import RunFile  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.tiny_model import VOCAB, build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "qwen3_moe": EXPERTS,
}
LOUD = 40.0
"""Times the head's weights: random ones give logits so small that no cap touches them."""


def build(family: str, **changes: Any) -> Any:
    transformers.set_seed(3)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes})
    attention = "eager" if family == "gemma2" else "sdpa"  # sdpa cannot cap the logits of attention
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        model.get_output_embeddings().weight *= LOUD
    return model.eval()


def labelled(vocab_size: int, *, rows: int, tokens: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, vocab_size, (rows, tokens), generator=generator)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)


def of_plain_logits(model: Any, ids: Any, labels: Any) -> Any:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    wanted = labels[:, 1:] != -100
    return -torch.nn.functional.cross_entropy(logits[wanted], labels[:, 1:][wanted], reduction="none")


def compare(model: Any, ids: Any, labels: Any) -> None:
    token_logps.install(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = of_plain_logits(model, ids, labels)
    found = model(input_ids=ids, score=labels, use_cache=False)["log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad(values.mean(), trained) for values in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scores_of_labelled_tokens_are_those_of_the_models_own_logits(family: str) -> None:
    compare(build(family), *labelled(VOCAB, rows=2, tokens=24))


@pytest.mark.parametrize("family", FAMILIES)
def test_under_a_head_that_is_not_trained_scores_and_gradients_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_logps.MAX_LOGIT_BYTES, "cpu", 10 * 4 * VOCAB)
    model = build(family)
    model.get_output_embeddings().weight.requires_grad_(False)
    ids, labels = labelled(VOCAB, rows=2, tokens=24)
    compare(model, ids, labels)
    found = model(input_ids=ids, score=labels, use_cache=False)["log_probs"].grad_fn
    assert {part.name() for part, _ in found.next_functions} == {"_FrozenHeadBackward"}


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_scores_in_slices_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size, rows_of_a_slice = 4096, 50
    monkeypatch.setitem(token_logps.MAX_LOGIT_BYTES, "cpu", rows_of_a_slice * 4 * vocab_size)
    ids, labels = labelled(vocab_size, rows=2, tokens=200)
    assert int((labels[:, 1:] != -100).sum()) > 4 * rows_of_a_slice, "too few slices"
    compare(build(family, vocab_size=vocab_size), ids, labels)


@pytest.mark.parametrize("rows_of_a_slice", [12, 5])
def test_right_answers_are_counted_in_every_slice(rows_of_a_slice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 8
    monkeypatch.setitem(token_logps.MAX_LOGIT_BYTES, "cpu", rows_of_a_slice * 4 * vocab_size)
    labels = torch.arange(12) % vocab_size
    chosen = torch.where(torch.arange(12) % 4 == 1, (labels + 1) % vocab_size, labels)
    logits = torch.nn.functional.one_hot(chosen, vocab_size).float()
    assert int(token_logps.score_tokens(logits, torch.nn.Identity(), labels, vocab_size=vocab_size)["correct"]) == 9


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "cohere"])
def test_a_model_that_transforms_its_logits_passes_the_self_test_and_trains(family: str, tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base")  # its tokenizer
    build(family).save_pretrained(base)
    spec = replace(SPEC, optimization=replace(SPEC.optimization, num_epochs=1, max_steps=2))
    run = RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=write_pack(tmp_path / "pack"), work_dir=tmp_path / "work")
    training = Training(run_file=run)
    assert training.attempt()
    assert training.details[0]["self_test"]["worst"] <= 1e-5
