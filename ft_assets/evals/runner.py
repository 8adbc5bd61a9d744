"""The evaluation process: ``python -m ft_assets.evals.runner RUN.json``.

It loads the base once, lets it answer (unless its answers are passed in), applies the adapter, proves that it is
applied, and lets it answer the same items. Everything is greedy; batching changes the speed only.

Leaves ``eval-result.json`` in the run's ``out_dir`` (written whole), and ``heartbeat.json`` at least every 5 s.
Exit codes: 0 evaluated (an adapter that changes nothing is not scored: the result's ``error`` is ``adapter_not_applied``, and
the gate quarantines it); 64 the input is refused (``error`` says why); 70 this program failed; 75 stopped by SIGTERM, and
nothing was written.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_assets.errors import FtError, InvalidRequest
from ft_assets.evals import run_file, suites
from ft_assets.evals.run_file import EvalRun

HEARTBEAT_S = 2.0
NLL_CAP = 1e4
"""Stands for a loss per token that is no number: keeps the result valid JSON, and the adapter last in any comparison."""
PROOF_PROMPT = "Say something."

Section = dict[str, Any]


class Stopped(BaseException):
    """SIGTERM arrived."""


class Heart:
    """Writes ``heartbeat.json`` from its own thread while the work goes on."""

    def __init__(self, out_dir: Path) -> None:
        self._path = out_dir / "heartbeat.json"
        self._state: dict[str, Any] = {"phase": "setup", "step": 0, "total_steps": 0}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def phase(self, phase: str, *, total_steps: int = 0) -> None:
        self._state = {"phase": phase, "step": 0, "total_steps": total_steps}
        self._write()

    def step(self, num: int) -> None:
        self._state = {**self._state, "step": self._state["step"] + num}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        self._write()
        while not self._stop.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            run_file.write_json(self._path, {"time": time.time(), "attempt": 1, **self._state})


class Subject:
    """A loaded model that answers suites; the adapter is switched by :meth:`applied`."""

    def __init__(self, base_model_dir: Path, *, batch_size: int, heart: Heart) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base_model_dir, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(base_model_dir, dtype=dtype, use_safetensors=True, trust_remote_code=False)
        self.model: Any = model.to(device).eval()
        self._device, self._exact_merge = device, dtype == torch.float32
        self._batch_size, self._heart = batch_size, heart
        self._pad = next(i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0) if i is not None)
        self._ends = _end_tokens(self.model, self.tokenizer)

    def add(self, name: str, adapter_dir: Path) -> None:
        """Load an adapter beside the base; the base stays reachable."""
        try:
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(str(adapter_dir), adapter_name=name)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(adapter_dir), adapter_name=name)
        except (ValueError, RuntimeError, KeyError) as e:
            raise InvalidRequest(f"adapter {adapter_dir} does not fit the base model: {e}", code="adapter_unloadable") from e
        self.model.eval()

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """The named adapter in effect: merged where that is exact to 1e-5 (fp32), beside the weights elsewhere."""
        self.model.set_adapter(name)
        with self._merged(name) if self._exact_merge else nullcontext():
            yield

    @contextmanager
    def _merged(self, name: str) -> Iterator[None]:
        self.model.merge_adapter([name])
        try:
            yield
        finally:
            self.model.unmerge_adapter()

    @torch.no_grad()
    def difference(self, name: str) -> float:
        """Largest difference between the adapter's and the base's logits on one prompt."""
        ids = torch.tensor([self.render([{"role": "user", "content": PROOF_PROMPT}])], device=self._device)
        self.model.set_adapter(name)
        with_adapter = self.model(input_ids=ids, use_cache=False).logits
        with self.model.disable_adapter():
            without = self.model(input_ids=ids, use_cache=False).logits
        return float((with_adapter - without).abs().max().nan_to_num(nan=math.inf))

    def render(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of the prompt, rendered by the model's own chat template."""
        ids = self.tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        return [int(i) for i in ids]

    def longest(self, texts: Sequence[str]) -> int:
        return max((len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]), default=0)

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
            self._heart.step(len(batch))
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
            self._heart.step(len(batch))
        return {"nll": nll, "tokens": [float(n) for n in tokens]}


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the model's, the tokenizer's, and the end of a ChatML turn if there is one."""
    given = model.generation_config.eos_token_id
    found = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    return sorted(i for i in found if i is not None)


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[:at] for at, token in enumerate(ids) if token in ends), ids)


def validation_examples(pack_dir: Path | None, *, limit: int) -> list[tuple[list[int], list[int]]]:
    """``(input_ids, labels)`` of the validation examples of a pack, windows cut back into their examples."""
    examples: list[tuple[list[int], list[int]]] = []
    for shard in sorted(pack_dir.glob("val-*.parquet")) if pack_dir else []:
        for row in pq.read_table(shard).to_pylist():
            ends = np.cumsum(row["seq_lengths"]).tolist()
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                labels = [-100, *row["labels"][start + 1 : end]]
                if any(label != -100 for label in labels):
                    examples.append((row["input_ids"][start:end], labels))
    step = max(1, math.ceil(len(examples) / limit))
    return examples[::step]


class Evaluation:
    """One run: the subject, its items, and the sections of the result."""

    def __init__(self, run: EvalRun, heart: Heart) -> None:
        self.run, self.heart = run, heart
        self.suite_digest = run.suite_digest()
        self.holdout = run.holdout_items()
        self.golden = suites.golden_items() if run.golden else []
        self.validation = validation_examples(run.validation_pack_dir, limit=run.max_items)
        self.subject = Subject(run.base_model_dir, batch_size=run.batch_size, heart=heart)

    def result(self) -> dict[str, Any]:
        started = time.monotonic()
        body: dict[str, Any] = {
            "format": 1,
            "suite_digest": self.suite_digest,
            "base": self._base(),
            "adapter": None,
            "previous": None,
            "applied": None,
        }
        body["error"] = None
        if self.run.adapter_dir:
            self.subject.add("candidate", self.run.adapter_dir)
            difference = self.subject.difference("candidate")
            body["applied"] = {"applied": difference > 0.0, "max_logit_difference": min(difference, sys.float_info.max)}
            if difference == 0.0:
                message = "the adapter changes nothing: its logits equal the base model's; look at whether training moved its weights"
                return {**body, "error": {"code": run_file.ADAPTER_NOT_APPLIED, "message": message, "param": None}}
            body["adapter"] = self._adapted("candidate", "adapter")
        if self.run.adapter_dir and self.run.previous_adapter_dir:
            self.subject.add("previous", self.run.previous_adapter_dir)
            body["previous"] = self._adapted("previous", "previous")
        return {**body, "seconds": time.monotonic() - started}

    def _base(self) -> Section:
        cached = self.run.base_scores
        if cached and cached.get("suite_digest") == self.suite_digest:
            return dict(cached)
        return self._section("base")

    def _adapted(self, name: str, title: str) -> Section:
        with self.subject.applied(name):
            return self._section(title)

    def _section(self, title: str) -> Section:
        started = time.monotonic()
        self.heart.phase(title, total_steps=len(self.holdout) + len(self.golden) + len(self.validation))
        decoding = self.run.decoding
        longest = self.subject.longest([item.expected or "" for item in self.holdout])
        budget = min(decoding.max_new_tokens, longest + longest // 2 + 8)
        section: Section = {
            "suite_digest": self.suite_digest,
            "holdout": self.subject.answer(self.holdout, budget),
            "golden": self.subject.answer(self.golden, decoding.golden_max_new_tokens) if self.golden else None,
            "validation": self.subject.loss(self.validation) if self.validation else None,
        }
        return {**section, "seconds": time.monotonic() - started}


def _on_sigterm(_signum: int, _frame: FrameType | None) -> None:
    raise Stopped


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(argv: Sequence[str]) -> int:
    """Evaluate as the run file says; see the module for exit codes."""
    if len(argv) != 1:
        _say("usage: python -m ft_assets.evals.runner RUN.json")
        return run_file.EXIT_BAD_INPUT
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        run = EvalRun.read(Path(argv[0]))
    except (InvalidRequest, OSError, ValueError, TypeError, json.JSONDecodeError) as e:
        _say(f"run file refused: {e}")
        return run_file.EXIT_BAD_INPUT
    heart = Heart(run.out_dir)
    run.out_dir.mkdir(parents=True, exist_ok=True)
    heart.start()
    try:
        result = Evaluation(run, heart).result()
        heart.phase("done")
        run_file.write_json(run.out_dir / run_file.RESULT_NAME, result)
        return run_file.EXIT_OK
    except Stopped:
        _say("stopped by SIGTERM; nothing was written")
        return run_file.EXIT_STOPPED
    except FtError as e:
        _say(f"refused: {e}")
        run_file.write_json(run.out_dir / run_file.RESULT_NAME, {"format": 1, "error": e.to_dict()})
        return run_file.EXIT_BAD_INPUT
    except Exception:
        traceback.print_exc()
        return run_file.EXIT_INTERNAL
    finally:
        heart.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
