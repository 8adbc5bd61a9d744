"""What an adapter answers: transformers and PEFT on the same files, greedy, in float32."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path


@cache
def expected_tokens(base: Path, adapter: Path | None, prompt: str, tokens: int = 16) -> tuple[int, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, at their import and at their loading
        return _generate(base, adapter, prompt, tokens)


def _generate(base: Path, adapter: Path | None, prompt: str, tokens: int) -> tuple[int, ...]:
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tuple(made[0, ids.shape[1] :].tolist())
