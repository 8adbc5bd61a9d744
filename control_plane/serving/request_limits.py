"""Limits of a request for an answer, at the gateway and in the embedded server; and fields that neither takes.

All tenants share an event loop and an engine's thread, so the time that a field takes in either is bounded here, before anything is parsed.
Each check takes time linear in the field's size and reports the first fault only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import InvalidRequest
from core.storable_text import num_characters
from engine.data import MAX_MESSAGES

MAX_STOPS, MAX_STOP_CHARS = 16, 256
"""Each stop string is searched for after each token, in the thread that all requests share."""
MAX_BIASES = 1024
MAX_N = 16
MAX_CHOICES = 128
"""Answers to one request over all of its prompts."""
MAX_TOOLS = 128
"""As in OpenAI's API."""
MAX_FIELD_CHARS = 1 << 16
"""Of any other field: the limit of schemas."""
CONVERSATION = frozenset(("messages", "prompt", "input", "instructions", "tools", "documents", "prediction"))
"""Fields that the context of the model limits."""


def check_limits(body: Mapping[str, Any]) -> None:
    """Refuse a body with a field above its limit; ``InvalidRequest`` names the field, its size and the limit."""
    for name, value in body.items():
        if value is None:
            continue
        if name in _CHECKS:
            _CHECKS[name](value)
        elif name not in CONVERSATION and num_characters(value, most=MAX_FIELD_CHARS) > MAX_FIELD_CHARS:
            what = f"{name[:80]} has more than {MAX_FIELD_CHARS} characters, keys and numbers included; shorten it"
            raise _refusal(what, name[:80], code="invalid_response_format" if name == "response_format" else "invalid_request")
    _check_choices(body)


def _check_stop(stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise _refusal("stop must be a text or a list of texts", "stop", code="invalid_type")
    if len(stops) > MAX_STOPS:
        raise _refusal(f"stop has {len(stops)} strings, and at most {MAX_STOPS} are allowed; leave some out", "stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise _refusal(f"stop has a string of {longest} characters, and at most {MAX_STOP_CHARS} are allowed; shorten it", "stop")


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, dict):
        raise _refusal('logit_bias must be an object such as {"50256": -100}', "logit_bias", code="invalid_type")
    if len(bias) > MAX_BIASES:
        raise _refusal(f"logit_bias has {len(bias)} tokens, and at most {MAX_BIASES} are allowed; leave some out", "logit_bias")
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and str(int(token)) == token):
            raise _refusal(f'logit_bias has the key {token[:40]!a}; write the id of a token, such as "50256"', "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise _refusal(f"logit_bias of token {token} is {ascii(value)[:40]}; write a number from -100 to 100", f"logit_bias.{token}")


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds in ({str}, {int}) or (kinds == {list} and all(set(map(type, one)) <= {int} for one in prompt)):
            return
    raise _refusal("prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt", code="invalid_type")


def _check_messages(name: str) -> Callable[[Any], None]:
    def check(given: Any) -> None:
        if isinstance(given, list) and len(given) > MAX_MESSAGES:
            raise _refusal(f"{name} has {len(given)} entries, limit {MAX_MESSAGES}; leave some out", name, code="too_many_messages")

    return check


def _check_tools(tools: Any) -> None:
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise _refusal(f"tools has {len(tools)} entries, limit {MAX_TOOLS}; leave some out", "tools", code="invalid_tools")


def _refuse_functions(functions: Any) -> None:
    if functions:
        what = 'functions is not supported; send each as {"type": "function", "function": {...}} in tools. Answers have tool_calls.'
        raise _refusal(what, "functions", code="unsupported_parameter")


def _refuse_function_call(_: Any) -> None:
    what = 'function_call is not supported; send tools, and tool_choice: "none", "auto" or {"type": "function", "function": {"name": ...}}'
    raise _refusal(what, "function_call", code="unsupported_parameter")


def _check_n(n: Any) -> None:
    if type(n) is not int:  # servers would read "16" and 16.0 as numbers
        raise _refusal(f"n is {ascii(n)[:40]}; write a whole number from 1 to {MAX_N}", "n", code="invalid_type")
    if n > MAX_N:
        raise _refusal(f"n is {n}, limit {MAX_N}; send several requests", "n")


def num_answers(body: Mapping[str, Any]) -> int:
    """Return for how many answers a checked body asks."""
    prompt, n = body.get("prompt"), body.get("n") or 1
    return int(n) * (len(prompt) if isinstance(prompt, list) and type(prompt[0]) is not int else 1)


def _check_choices(body: Mapping[str, Any]) -> None:
    if (number := num_answers(body)) > MAX_CHOICES:
        raise _refusal(f"the prompts and n ask for {number} answers, limit {MAX_CHOICES}; send several requests", "prompt")


def _refusal(message: str, param: str, *, code: str = "invalid_request") -> InvalidRequest:
    return InvalidRequest(message, code=code, param=param)


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "stop": _check_stop,
    "logit_bias": _check_bias,
    "prompt": _check_prompt,
    "messages": _check_messages("messages"),
    "input": _check_messages("input"),
    "tools": _check_tools,
    "functions": _refuse_functions,
    "function_call": _refuse_function_call,
    "n": _check_n,
}
