"""Valid bodies of every family of requests, from the tables that check them: a new hyperparameter, method or policy is in here at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from control_plane.datasets.uploads.schemas import CreateUpload
from engine.data.policies import policy_options
from engine.evals.config import EvalConfig
from engine.training import methods
from engine.training.methods import Limit
from engine.training.requested_hyperparameters import HYPERPARAMETER_LIMITS

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is my parcel?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"id": 1}'}}
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": SCHEMA}}
LEAF = {"type": "string_check", "name": "same", "input": "{{sample.output_text}}", "reference": "{{item.a}}", "operation": "eq"}
ALIKE = {
    "type": "text_similarity",
    "name": "near",
    "input": "{{sample.output_json.a}}",
    "reference": "{{item.b[0]}}",
    "evaluation_metric": "bleu",
}
MULTI = {"type": "multi", "name": "all", "graders": {"same": LEAF, "near": ALIKE}, "calculate_output": "0.5 * same + max(near, 0.1)"}

IN_4_BITS = {"adapter": "qlora"}
OF_EXPERTS = ("train_experts", "train_router")
"""Hyperparameters that the tests' base model refuses, because it has no experts."""
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "schedule_decay_ratio": {"schedule": "wsd", "warmup_ratio": 0.0}, "schedule_decay_shape": {"schedule": "wsd"},
    "schedule_power": {"schedule": "polynomial"},
    "schedule_cycles": {"schedule": "cosine_with_restarts"}, "schedule_timescale": {"schedule": "inverse_sqrt"},
    "early_stopping_min_delta": {"early_stopping_patience": 2}, "quantization": IN_4_BITS, "double_quantization": IN_4_BITS,
}  # fmt: skip
"""Hyperparameters without which another one has no effect, and is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    paths: Sequence[str]
    """Of which each body is sent to one; ``{name}`` stands for an id of the tenant's."""
    bodies: Sequence[Mapping[str, Any]]
    method: str = "POST"


def value_for(limit: Limit) -> Any:
    """A value that `limit` accepts."""
    if limit.kind == "modules":
        return list(limit.words[:2])
    if limit.words:
        return limit.words[0]
    if limit.kind == "flag":
        return True
    value = limit.allowed[0] if limit.allowed else min(limit.high, max(limit.low, 0) + 1) if limit.high >= 1 else limit.high
    return int(value) if limit.kind == "int" else float(value)


def jobs(known: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """A job of every method with all of its settings, one of every general hyperparameter, and one of every extension."""
    base = {"model": known["model"], "training_file": known["file"], "seed": 1}
    made: list[Mapping[str, Any]] = []
    for name, method in methods.registered_methods().items():
        own = {setting: value_for(one.limit) for setting, one in method.settings.items()}
        file = known[f"{next(rows for rows in ('chat', 'preference', 'kto') if rows in method.rows)}_file"]
        made.append(
            {
                **base,
                "training_file": file,
                "method": {"type": name, name: {"hyperparameters": {"n_epochs": 1, "batch_size": "auto", **own}}},
            }
        )
    made += [
        {**base, "hyperparameters": {name: value_for(limit), **NEEDED.get(name, {})}}
        for name, limit in HYPERPARAMETER_LIMITS.items()
        if name not in OF_EXPERTS
    ]
    config = {one.name: one.default for one in fields(EvalConfig) if one.default not in (None, ())}
    made.append({**base, "eval_config": {**config, "skip": ["golden", "judge"], "capability": []}, "metadata": {"team": "a"}})
    made.append(
        {**base, "hardware": {"num_gpus": 1, "strategy": "single"}, "tier": "free", "spot": True, "suffix": "a", "adapter": "qlora"}
    )
    wandb = {"project": "p", "name": "n", "entity": "e", "tags": ["t"]}
    made.append({**base, "integrations": [{"type": "wandb", "wandb": wandb}], "auto_promote": False, "idempotency_key": "k"})
    mixed = {
        "model": known["model"],
        "training_files": [{"file": known["file"], "weight": 2}, {"file": known["other_file"], "weight": 1.5}],
    }
    return [
        *made,
        mixed,
        {**base, "validation_file": known["other_file"], "recipe": "any-lora@3", "force": True, "warm_start": known["adapter"]},
    ]


def chats(known: Mapping[str, str]) -> list[Mapping[str, Any]]:
    base = {"model": known["model"], "messages": TALK, "max_tokens": 2}
    answered = [
        *TALK,
        {"role": "assistant", "tool_calls": [CALL], "content": None},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    return [
        {**base, "temperature": 0, "top_p": 0.9, "n": 2, "stop": ["a", "b"], "seed": 1, "user": "u", "presence_penalty": 0.5},
        {**base, "logit_bias": {"5": -100, "6": 1.5}, "logprobs": True, "top_logprobs": 3, "frequency_penalty": -1},
        {**base, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {**base, "response_format": {"type": "json_object"}, "max_completion_tokens": 2},
        {**base, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}, "parallel_tool_calls": False},
        {**base, "messages": answered, "tools": [TOOL], "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}},
        {**base, "messages": [{"role": "user", "content": [{"type": "text", "text": "Where?"}], "name": "n"}], "metadata": {"a": "b"}},
    ]


def responses(known: Mapping[str, str]) -> list[Mapping[str, Any]]:
    base = {"model": known["model"], "input": "Where is my parcel?", "max_output_tokens": 16}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ]
    function = {"type": "function", **TOOL["function"], "strict": True}  # type: ignore[dict-item]
    text = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
    return [
        {**base, "instructions": "Be brief.", "temperature": 0.5, "store": False, "metadata": {"a": "b"}},
        {**base, "input": items, "tools": [function], "tool_choice": "auto"},
        {**base, "text": text, "stream": True, "truncation": "disabled"},
    ]


def policies() -> Mapping[str, Any]:
    return {name: option.default for name, option in policy_options().items() if option.default is not None}


def families(known: Mapping[str, str]) -> Mapping[str, Family]:
    """All families; `known` has the ``model``, and ids of the tenant's: ``file``, ``other_file``, and one of each kind of rows."""
    file = {"bytes": 100, "filename": "a.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune", "policies": policies()}
    assert set(file) <= set(CreateUpload.model_fields)
    one_job = {"model": known["model"], "training_file": known["file"]}
    ranges = {"learning_rate": {"min": 1e-5, "max": 1e-3, "scale": "log"}, "rank": [8, 16]}
    return {
        "jobs": Family(paths=("/v1/fine_tuning/jobs", "/v1/fine_tuning/estimate"), bodies=jobs(known)),
        "sweeps": Family(paths=("/v1/fine_tuning/sweeps",), bodies=[
            {**one_job, "sweep": {"strategy": "random", "parameters": ranges, "max_jobs": 2, "seed": 1, "metric": "eval_loss"}},
            {**one_job, "sweep": {"strategy": "grid", "parameters": {"rank": [8, 16]}, "goal": "minimize"}},
        ]),
        "previews": Family(paths=("/v1/fine_tuning/preview",), bodies=[
            {"model": known["model"], "training_file": known["file"], "num_examples": 2, "max_seq_len": 128},
        ]),
        "chat": Family(paths=("/v1/chat/completions",), bodies=chats(known)),
        "responses": Family(paths=("/v1/responses",), bodies=responses(known)),
        "completions": Family(paths=("/v1/completions",), bodies=[
            {"model": known["model"], "prompt": ["Where", "is"], "max_tokens": 2, "echo": True, "logprobs": 2, "n": 2, "stop": "."},
            {"model": known["model"], "prompt": [[5, 6], [7]], "max_tokens": 1, "suffix": None, "stream": True, "logit_bias": {"5": 1}},
        ]),
        "graders": Family(paths=("/v1/fine_tuning/alpha/graders/run", "/v1/fine_tuning/alpha/graders/validate"), bodies=[
            {"grader": grader, "item": {"a": "x", "b": ["y"]}, "model_sample": '{"a": "x"}'} for grader in (LEAF, ALIKE, MULTI)
        ] + [{"grader": MULTI}]),
        "uploads": Family(paths=("/v1/uploads",), bodies=[
            {**file, "expires_after": {"anchor": "created_at", "seconds": 3600}, "column_map": {"q": "prompt"}, "rows_at": "rows"},
            {**file, "encoding": "utf-8", "model": known["model"]},
        ]),
        "imports": Family(paths=("/v1/datasets/import",), bodies=[
            {"hub_id": "hf://owner/name@" + "a" * 40, "column_map": {"q": "prompt"}, "policies": policies(), "hub_token": "hf_x"},
        ]),
        "webhooks": Family(paths=("/v1/webhook_endpoints", "/v1/webhook_endpoints/{endpoint}"), bodies=[
            {"name": "a", "url": "https://127.0.0.1:9/hook", "event_types": ["fine_tuning.job.failed"]},
            {"name": "b", "state": "disabled", "event_types": ["*"]},
        ]),
        "account": Family(paths=("/v1/api_keys", "/v1/budgets", "/v1/members", "/v1/budgets/{budget}"), bodies=[
            {"name": "a", "scopes": ["read"], "expires_in": 3600, "requests_per_minute": 10},
            {"name": "b", "limit_micros": 10**6, "thresholds": [50, 100]},
            {"email": "a@example.com", "role": "viewer", "name": "A"},
        ]),
        "routes": Family(method="PUT", paths=("/v1/model_routes/support",), bodies=[
            {"targets": [{"model": known["model"], "weight": 90}, {"model": known["served"], "weight": 10}]},
        ]),
    }  # fmt: skip
