"""Verifies that an export answers like base and adapter: compares their logits on the same tokens, computed by a library other than the
one that merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from core.base_models import count_parameters
from core.errors import FtError
from engine.adapters import package, tensors
from engine.adapters.exports import llama_cpp
from engine.training.runtime.model import decoder

NUM_SEQUENCES, NUM_TOKENS, SEED = 2, 64, 7
SMALL = 1_500_000_000
"""Parameters up to which the proof computes in float32."""
COMPUTE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of the computation for larger models, by how they are stored: such weights are mapped from their files, not copied. The rounding
of 16 bits is part of the difference."""
TOLERANCES: Mapping[str, float] = {"F32": 1e-3, "F16": 0.02, "BF16": 0.05, "Q8_0": 0.1, "FP8": 0.4, "Q4_K_M": 0.8}
"""Mean difference of logits, as a share of their standard deviation, by how the weights are stored: half of the last bit of every weight
moves an answer by a few percent at most; a wrong scale or a swapped head moves it by tens. Logits that have nothing to do with each other
differ by 1.13. FP8 moved those of tiny random models, which no training made robust, by 0.10 and 0.21, Q4_K_M by 0.28; so the last two only
find what is broken, and what is quantized is proven before."""
LARGE_TOLERANCE = 0.08
"""The same for a model that is computed in 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    mean_difference: float
    """Difference of logits, in standard deviations of the reference's."""
    max_difference: float
    """Absolute difference of logits."""
    top1_agreement: float
    """Share of positions with the same most likely token."""
    adapter_effect: float
    """Mean difference between base and reference in the same unit: the expected value if nothing had been merged."""
    tolerance: float
    compute: str
    """Type in which the reference was computed."""
    computed_by: str
    """Library that answered from the export."""
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    logits: torch.Tensor
    effect: float
    dtype: torch.dtype


def reference(base_dir: Path, adapter_dir: Path) -> Reference:
    """Returns the logits of base and adapter, unmerged."""
    source = base_dir if (adapter_dir / package.ADAPTER_WEIGHTS).is_file() else adapter_dir
    dtype = torch.float32 if count_parameters(base_dir) <= SMALL else COMPUTE[stored_type(source)]
    model = decoder.load(source, dtype=dtype).train(False)
    effect = 0.0
    if source == base_dir:
        plain = _logits(model, base_dir)
        model = PeftModel.from_pretrained(model, str(adapter_dir)).train(False)
        logits = _logits(model, base_dir)
        effect = float((logits - plain).abs().mean() / logits.std())
    else:
        logits = _logits(model, base_dir)
    model.to("meta")  # frees its weights, though modules refer to each other in cycles
    return Reference(logits=logits, effect=effect, dtype=dtype)


def prove(wanted: Reference, exported: Path, *, stored: str) -> Proof:
    """Returns the proof of the weights in `exported`; raises ``export_not_faithful`` if they answer differently."""
    model = decoder.load(exported, dtype=wanted.dtype).train(False)
    logits = _logits(model, exported)
    model.to("meta")
    return _compared(wanted, logits, stored=stored, computed_by="transformers")


def prove_gguf(wanted: Reference, file: Path, model_dir: Path, *, stored: str) -> Proof:
    """Returns the proof of a GGUF file: llama.cpp answers from it where it is installed, else transformers, which reads no Q4_K_M here.

    `model_dir` holds the model's config.
    """
    if llama_cpp.is_installed():
        logits = torch.from_numpy(llama_cpp.logits(file, tokens_of(model_dir).tolist()))
        return _compared(wanted, logits, stored=stored, computed_by="llama.cpp")
    beside = model_dir / file.name
    beside.symlink_to(file)
    options = {"gguf_file": file.name, "config": _gguf_config(model_dir), "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=wanted.dtype, **options).train(False)
    logits = _logits(model, model_dir)
    model.to("meta")
    return _compared(wanted, logits, stored=stored, computed_by="transformers")


def _compared(wanted: Reference, logits: torch.Tensor, *, stored: str, computed_by: str) -> Proof:
    limit = TOLERANCES[stored] if wanted.dtype == torch.float32 else max(LARGE_TOLERANCE, TOLERANCES[stored])
    difference = (logits - wanted.logits).abs()
    proof = Proof(
        mean_difference=float(difference.mean() / wanted.logits.std()),
        max_difference=float(difference.max()),
        top1_agreement=float((logits.argmax(-1) == wanted.logits.argmax(-1)).float().mean()),
        adapter_effect=wanted.effect,
        tolerance=limit,
        compute=str(wanted.dtype).removeprefix("torch."),
        computed_by=computed_by,
        num_tokens=NUM_SEQUENCES * NUM_TOKENS,
    )
    if not proof.mean_difference <= limit:
        raise FtError(
            f"the export's output differs from that of the base with the adapter: logits differ by {proof.mean_difference:.3g} "
            f"of their standard deviation, {limit:g} is allowed; the export is withheld, contact the operator",
            code="export_not_faithful",
        )
    return proof


def _gguf_config(directory: Path) -> Any:
    """Returns the model's own config: readers of GGUF do not take all of it from the file. Mistral without a window is Llama there."""
    config = AutoConfig.from_pretrained(directory)
    if config.model_type != "mistral":
        return config
    known = LlamaConfig().to_dict()
    return LlamaConfig(**{k: v for k, v in config.to_dict().items() if k in known and k != "model_type"})


@torch.no_grad()
def _logits(model: Any, directory: Path) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=tokens_of(directory)).logits.float()
    return found


def tokens_of(directory: Path) -> torch.Tensor:
    """Returns the tokens that every model answers to, shape (sequences, tokens)."""
    vocabulary = int(AutoConfig.from_pretrained(directory).get_text_config(decoder=True).vocab_size)
    return torch.randint(0, vocabulary, (NUM_SEQUENCES, NUM_TOKENS), generator=torch.Generator().manual_seed(SEED))


def stored_type(directory: Path) -> str:
    """Returns the coarsest type in which a matrix of the model is stored."""
    kinds = {t.dtype for f in directory.glob("*.safetensors") for t in tensors.tensor_header(f).values() if len(t.shape) > 1}
    return next((k for k in ("BF16", "F16") if k in kinds), "F32")
