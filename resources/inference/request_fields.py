"""Fields of a request for an answer: null means absent, and a field that would change the answer has its effect or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from control_plane.serving.request_limits import check_limits
from core.errors import did_you_mean
from resources.inference.request_errors import RequestError

Kind = Literal["chat", "completion"]
SHARED = (
    "model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "n", "response_format", "frequency_penalty",
    "presence_penalty", "logit_bias", "logprobs",
)  # fmt: skip
USED: Mapping[Kind, frozenset[str]] = {
    "chat": frozenset(
        (
            *SHARED, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "functions",
            "function_call", "chat_template_kwargs", "enable_thinking",
        )
    ),
    "completion": frozenset((*SHARED, "prompt", "echo")),
}  # fmt: skip
WITHOUT_EFFECT = frozenset(
    (
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "prediction",
    )
)  # fmt: skip
"""Fields of OpenAI's clients about who asks, caches and speed: they change no answer."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": (),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields of OpenAI's and vLLM's that this server does not implement, with the values that ask for nothing."""
SPECIAL_TOKENS: Mapping[Kind, bool] = {"chat": False, "completion": True}
"""Value of `add_special_tokens` that asks for nothing: chat templates write their own, and texts get the tokenizer's."""
INSTEAD: Mapping[str, str] = {
    "store": "answers are not stored; leave it out",
    "reasoning_effort": 'send "chat_template_kwargs": {"reasoning_effort": ...} if the model\'s chat template reads it',
    "best_of": "send n, and choose by logprobs",
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), "use response_format"),
}
MAX_NAMED = 80


def checked(body: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return `body` without fields that are null.

    ``InvalidRequest`` for a field above its limit; ``RequestError`` for one that is not known, or not implemented and not neutral.
    """
    given = {name: value for name, value in body.items() if value is not None}
    check_limits(given)
    neutral = {**NEUTRAL, "add_special_tokens": (SPECIAL_TOKENS[kind],)}
    for name, value in given.items():
        if name in USED[kind] or name in WITHOUT_EFFECT:
            continue
        if name in neutral:
            if not any((type(value) is not bool and value == one) or value is one for one in neutral[name]):
                how = INSTEAD.get(name, "leave it out")
                raise RequestError(f"{name} is not supported by this server; {how}.", code="unsupported_parameter", param=name)
            continue
        other = did_you_mean(name, (*USED[kind], *WITHOUT_EFFECT)) or "; remove it."
        raise RequestError(f"{name[:MAX_NAMED]!r} is not a field of this request{other}", code="unknown_parameter", param=name[:MAX_NAMED])
    return given
