"""The model under evaluation: the base, with adapters switched on and off, or a whole model in its place.

The only module of this stage that imports torch; the runner imports it after it has read its input.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_assets.errors import InvalidRequest
from ft_assets.evals import suites

NLL_CAP = 1e4
"""Stands for a loss per token that is no number: keeps the result valid JSON, and the adapter last in any comparison."""
PROOF_PROMPT = "Say something."
ADAPTER_CONFIG = "adapter_config.json"
"""What a directory with an adapter holds, and one with a whole model does not."""


class Subject:
    """A loaded model that answers suites; what is judged beside the base is switched on by :meth:`applied`.

    Adapters share the base. A whole model takes its place in memory: there is room for one.
    """

    def __init__(self, base_model_dir: Path, *, batch_size: int, progress: Callable[[int], None]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base_model_dir, trust_remote_code=False)
        self._device, self._dtype = device, dtype
        self._base_dir, self._directories = base_model_dir, dict[str, Path]()
        self._load(base_model_dir)
        self._batch_size, self._progress = batch_size, progress
        self._pad = next(i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0) if i is not None)
        self._ends = _end_tokens(self.model, self.tokenizer)

    def add(self, name: str, directory: Path) -> None:
        """What may be applied under `name`: an adapter of the base, or a whole model."""
        self._directories[name] = directory
        if not self._is_whole(name):
            self._attach(name)

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """`name` in effect: an adapter merged where that is exact to 1e-5 (fp32), beside the weights elsewhere; a whole model as it is."""
        if self._is_whole(name):
            self._load(self._directories[name])
            yield
            return
        self._attach(name)
        self.model.set_adapter(name)
        with self._merged(name) if self._dtype == torch.float32 else nullcontext():
            yield

    def _is_whole(self, name: str) -> bool:
        return not (self._directories[name] / ADAPTER_CONFIG).is_file()

    def _load(self, directory: Path) -> None:
        """Have the model of `directory` in memory, bare, in place of what was there."""
        if getattr(self, "_loaded", None) == directory:
            return
        self.model: Any = None
        gc.collect()
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            model, found = load(directory, dtype=self._dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True)
        except (ValueError, RuntimeError, KeyError, OSError) as e:
            if directory == self._base_dir:
                raise
            raise InvalidRequest(f"the model in {directory} cannot be loaded: {e}", code="adapter_unloadable") from e
        if directory != self._base_dir and (absent := [*found["missing_keys"], *found["mismatched_keys"]]):
            raise InvalidRequest(f"the model in {directory} lacks {absent[0]}, or it has another shape", code="adapter_unloadable")
        self.model = model.to(self._device).eval()
        self._loaded, self._attached = directory, set[str]()

    def _attach(self, name: str) -> None:
        """Have the base in memory, and the adapter `name` beside it."""
        self._load(self._base_dir)
        if name in self._attached:
            return
        directory = self._directories[name]
        try:
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(str(directory), adapter_name=name)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(directory), adapter_name=name)
        except (ValueError, RuntimeError, KeyError) as e:
            raise InvalidRequest(f"adapter {directory} does not fit the base model: {e}", code="adapter_unloadable") from e
        self._attached.add(name)
        self.model.eval()

    @contextmanager
    def _merged(self, name: str) -> Iterator[None]:
        self.model.merge_adapter([name])
        try:
            yield
        finally:
            self.model.unmerge_adapter()

    @torch.no_grad()
    def difference(self, name: str) -> float:
        """Largest difference between its and the base's logits on one prompt."""
        ids = torch.tensor([self.render([{"role": "user", "content": PROOF_PROMPT}])], device=self._device)
        self._load(self._base_dir)
        with self.model.disable_adapter() if self._attached else nullcontext():
            without = self.model(input_ids=ids, use_cache=False).logits
        if self._is_whole(name):
            self._load(self._directories[name])
        else:
            self._attach(name)
            self.model.set_adapter(name)
        changed = self.model(input_ids=ids, use_cache=False).logits
        return float((changed - without).abs().max().nan_to_num(nan=math.inf))

    def render(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of the prompt, rendered by the model's own chat template."""
        ids = self.tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        return [int(i) for i in ids]

    def longest(self, texts: Sequence[str]) -> int:
        """Tokens of the longest text."""
        return max((len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts), default=0)

    @torch.no_grad()
    def answer(self, items: Sequence[suites.Item], max_new_tokens: int) -> dict[str, str]:
        """Greedy answers by item id; prompts of like length go together so that little is padding."""
        prompts = {item.id: self.render(item.messages) for item in items}
        limit = getattr(self.model.config, "max_position_embeddings", 1 << 30) - 1
        order = sorted(prompts, key=lambda id_: len(prompts[id_]))
        answers: dict[str, str] = {}
        for at in range(0, len(order), self._batch_size):
            batch = order[at : at + self._batch_size]
            rows = [prompts[id_][-limit:] for id_ in batch]
            budget = max(1, min(max_new_tokens, limit + 1 - len(rows[-1])))
            for id_, ids in zip(batch, self._generate(rows, budget), strict=True):
                answers[id_] = self.tokenizer.decode(ids, skip_special_tokens=True)
            self._progress(len(batch))
        return {item.id: answers[item.id] for item in items}

    def _generate(self, rows: Sequence[list[int]], budget: int) -> list[list[int]]:
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self._device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=budget,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=self._ends,
            pad_token_id=self._pad,
        )
        return [_until(row, self._ends) for row in out[:, width:].tolist()]

    @torch.no_grad()
    def loss(self, examples: Sequence[tuple[list[int], list[int]]]) -> dict[str, list[float]]:
        """Negative log-likelihood and trained tokens of each example, in the given order."""
        nll, tokens = [0.0] * len(examples), [0] * len(examples)
        order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]))
        for at in range(0, len(order), self._batch_size):
            batch = order[at : at + self._batch_size]
            width = max(len(examples[i][0]) for i in batch)
            ids = torch.tensor([examples[i][0] + [self._pad] * (width - len(examples[i][0])) for i in batch], device=self._device)
            labels = torch.tensor([examples[i][1] + [-100] * (width - len(examples[i][1])) for i in batch], device=self._device)
            # Padding is on the right and attention is causal: real tokens never see it, so no mask is needed.
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100)
            for i, row, trained in zip(batch, each, labels[:, 1:] != -100, strict=True):
                tokens[i] = int(trained.sum())
                nll[i] = float(row.double().sum().nan_to_num(nan=NLL_CAP * max(1, tokens[i])))
            self._progress(len(batch))
        return {"nll": nll, "tokens": [float(n) for n in tokens]}


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the model's, the tokenizer's, and the end of a ChatML turn if there is one."""
    given = model.generation_config.eos_token_id
    found = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    return sorted(i for i in found if i is not None)


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[:at] for at, token in enumerate(ids) if token in ends), ids)
