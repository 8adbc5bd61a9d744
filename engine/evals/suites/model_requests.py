"""Requests to a model under evaluation, for all suites.

A suite is turned into requests, the runner has each subject answer them and stores every answer under the request's id; scores are computed
from the answers afterwards. A request contains everything that affects its answer, so the digest of a suite's requests is the key under
which answers are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from core.typed_json import JsonObject
from engine.data import TemplateValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """A greedy answer to a conversation, or to a plain text. Its answer: ``str``."""

    id: str
    messages: tuple[JsonObject, ...] = ()
    """Rendered by the model's own chat template; empty where `text` is given."""
    tools: tuple[JsonObject, ...] = ()
    """Tools that the conversation offers; rendered with it."""
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    """Further variables of the chat template."""
    text: str = ""
    """Plain text to continue."""
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    """The answer ends before the first of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood:
    """The likelihood of `continuation` after `context`. Its answer: ``[log-probability in nats, 1.0 if it is the greedy continuation]``."""

    id: str
    context: str
    continuation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Negative log-likelihood of the labeled tokens. Its answer: ``[nats, labeled tokens]``."""

    id: str
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    """-100 for tokens without loss; ``labels[i]`` is predicted from ``input_ids[:i]``."""


Request = Generate | Likelihood | Loss
Answer = str | list[float] | Mapping[str, Any]
"""A mapping if a classifier added its verdict to a text: ``{"text", "refused", "by"}``."""
Answers = Mapping[str, Answer]
"""By id of the request."""


def digest(suite: str, requests: Sequence[Request], *, protocol: int) -> str:
    """Returns the key of a suite's answers: covers every request in order, and `protocol`, which is raised when the meaning of answers
    changes. Keys of tools and arguments count in their order, in which templates render them."""
    whole = hashlib.sha256(json.dumps([suite, protocol]).encode())
    for request in requests:
        body = {"kind": type(request).__name__, **asdict(request)}
        if not body.get("template_kwargs"):  # absent from the digests of requests without them
            body.pop("template_kwargs", None)
        whole.update(json.dumps(body, separators=(",", ":")).encode())
    return whole.hexdigest()
