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

from ft_assets.adapters import package
from ft_assets.errors import FtError
from ft_assets.training.runtime.model import decoder

NUM_SEQUENCES, NUM_TOKENS, SEED = 2, 64, 7
SMALL = 1_500_000_000
"""Parameters up to which the proof computes in float32; above, in bfloat16, whose rounding is then part of the difference."""
TOLERANCES: Mapping[str, float] = {"F32": 1e-3, "F16": 0.02, "BF16": 0.05, "Q8_0": 0.1}
"""Mean difference of logits, as a share of their standard deviation, by how the weights are stored: half of the last bit of every weight
moves an answer by a few percent at most; a wrong scale or a swapped head moves it by tens."""
LARGE_TOLERANCE = 0.08
"""The same for a model that is computed in bfloat16."""


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
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    logits: torch.Tensor
    effect: float
    dtype: torch.dtype


def reference(base_dir: Path, adapter_dir: Path) -> Reference:
    """Returns the logits of base and adapter, unmerged."""
    dtype = torch.float32 if _num_parameters(base_dir) <= SMALL else torch.bfloat16
    source = base_dir if (adapter_dir / package.WEIGHTS).is_file() else adapter_dir
    model = _load(source, dtype)
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


def prove(wanted: Reference, exported: Path, *, stored: str, gguf_file: str | None = None) -> Proof:
    """Returns the proof; raises ``export_not_faithful`` if the export answers differently.

    `exported` holds the config and the weights, or the GGUF file, which is then read instead.
    """
    options = {} if gguf_file is None else {"gguf_file": gguf_file, "config": _gguf_config(exported)}
    model = _load(exported, wanted.dtype, **options)
    logits = _logits(model, exported)
    model.to("meta")
    limit = TOLERANCES[stored] if wanted.dtype == torch.float32 else max(LARGE_TOLERANCE, TOLERANCES[stored])
    difference = (logits - wanted.logits).abs()
    proof = Proof(
        mean_difference=float(difference.mean() / wanted.logits.std()),
        max_difference=float(difference.max()),
        top1_agreement=float((logits.argmax(-1) == wanted.logits.argmax(-1)).float().mean()),
        adapter_effect=wanted.effect,
        tolerance=limit,
        compute=str(wanted.dtype).removeprefix("torch."),
        num_tokens=NUM_SEQUENCES * NUM_TOKENS,
    )
    if not proof.mean_difference <= limit:
        raise FtError(
            f"the export's output differs from that of the base with the adapter: logits differ by {proof.mean_difference:.3g} "
            f"of their standard deviation, {limit:g} is allowed; the export is withheld, contact the operator",
            code="export_not_faithful",
        )
    return proof


def _load(directory: Path, dtype: torch.dtype, **options: Any) -> Any:
    if "gguf_file" in options:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=False, **options).train(False)
    return decoder.load(directory, dtype=dtype).train(False)


def _gguf_config(directory: Path) -> Any:
    """Returns the model's own config: readers of GGUF do not take all of it from the file. Mistral without a window is Llama there."""
    config = AutoConfig.from_pretrained(directory)
    if config.model_type != "mistral":
        return config
    known = LlamaConfig().to_dict()
    return LlamaConfig(**{k: v for k, v in config.to_dict().items() if k in known and k != "model_type"})


@torch.no_grad()
def _logits(model: Any, directory: Path) -> torch.Tensor:
    vocabulary = int(AutoConfig.from_pretrained(directory).get_text_config(decoder=True).vocab_size)
    tokens = torch.randint(0, vocabulary, (NUM_SEQUENCES, NUM_TOKENS), generator=torch.Generator().manual_seed(SEED))
    found: torch.Tensor = model(input_ids=tokens).logits.float()
    return found


def _num_parameters(directory: Path) -> int:
    from ft_assets.base_models import count_parameters

    return count_parameters(directory)
