"""Suites: the requests to every subject of an evaluation, and the digest under which answers are kept.

A suite is a list of requests (:mod:`engine.evals.suites.model_requests`). Its digest covers everything that affects an answer, so kept
answers are either exactly right or not found; it does not cover scoring, so a new metric needs no new answers.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from core.typed_json import JsonObject, from_json
from engine.data import REASONING_FIELDS, TemplateValue, ThinkMarks
from engine.evals.suites import answer_metrics, golden, preferences, tool_calls
from engine.evals.suites import model_requests as requests

Kind = Literal["golden", "holdout", "validation", "unwanted", "safety", "capability", "scored"]

GOLDEN, HOLDOUT, VALIDATION, UNWANTED, SAFETY, CAPABILITY = "golden", "holdout", "validation", "unwanted", "safety", "capability"
"""Ids of the suites that exist once; a capability suite's is ``capability/<name>``."""
SCORED_PREFIX = "suite/"
"""Prefix of the ids of a tenant's scored suites."""
PROTOCOL = 5
"""Raised whenever the meaning of rendering or decoding changes: older answers are then not found."""
MAX_REASONING_TOKENS = 4096
"""Most tokens of reasoning, besides those of the answer itself."""
SHORT_ANSWER_WORDS = 8
"""Most words of an expected answer that can be compared exactly (a label, a number, a name)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    id: str
    messages: tuple[JsonObject, ...]
    """The prompt: every turn before the answer."""
    expected: str | None = None
    """The wanted answer, without reasoning; None if any coherent one will do."""
    tools: tuple[JsonObject, ...] = ()
    """Tools that the prompt offers."""
    reasoning: str = ""
    """Reasoning in the row before this answer: it needs tokens, and is scored only if the job asks for it."""
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    """Variables of the row for the chat template."""
    calls: bool = False
    """Whether the expected answer is tool calls, in canonical form (:mod:`engine.evals.suites.tool_calls`)."""
    schema: JsonObject | None = None
    """JSON schema that the answer must satisfy; None if the row has no response format. Read only by scoring: not in :meth:`to_dict`."""

    def to_dict(self) -> Mapping[str, Any]:
        body: dict[str, Any] = {"id": self.id, "messages": [dict(m) for m in self.messages], "expected": self.expected}
        body |= {"tools": [dict(t) for t in self.tools]} if self.tools else {}
        body |= {"template_kwargs": dict(self.template_kwargs)} if self.template_kwargs else {}
        body |= {"calls": True} if self.calls else {}
        return body | ({"reasoning": self.reasoning} if self.reasoning else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """Greedy decoding: no temperature and no seed, the same answer on every run."""

    max_new_tokens: int = 256
    """Most tokens of an answer to a holdout item; lowered to what the longest expected answer needs."""
    golden_max_new_tokens: int = 64
    """Most tokens of an answer to a golden prompt: enough to detect a loop."""

    @classmethod
    def limited(cls, max_new_tokens: int) -> Self:
        """Returns the settings of an evaluation with this limit, which holds for golden prompts too."""
        return cls(max_new_tokens=max_new_tokens, golden_max_new_tokens=min(64, max_new_tokens))


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Requests in their order; ids are unique within the suite."""

    id: str
    kind: Kind
    requests: tuple[requests.Request, ...]
    version: str | None = None
    """Version of shipped and operators' suites; a tenant's own rows have none."""
    items: tuple[Item, ...] = ()
    """Prompts and expected answers, of golden, holdout and safety suites; an item has its request's id."""
    num_items: int
    """Ids of the scored items: an item of a capability suite may take several requests."""

    @cached_property
    def digest(self) -> str:
        """Key of the suite's answers, known before anything is generated. Versions of a scored suite share those of equal requests."""
        of_version = bool(self.version) and self.kind != "scored"
        return requests.digest(f"{self.id}@{self.version}" if of_version else self.id, self.requests, protocol=PROTOCOL)


def conversation_suite(
    kind: Kind, items: Sequence[Item], *, max_new_tokens: int, version: str | None = None, name: str | None = None
) -> Suite:
    """A suite with a conversation for every item; `name`: its id, if it is not its kind."""
    requested = tuple(
        requests.Generate(id=i.id, messages=i.messages, tools=i.tools, template_kwargs=i.template_kwargs, max_new_tokens=max_new_tokens)
        for i in items
    )
    return Suite(id=name or kind, kind=kind, requests=requested, version=version, items=tuple(items), num_items=len(items))


def golden_suite(decoding: Decoding) -> Suite:
    """Returns the golden set, which ships (:mod:`golden`)."""
    items = [Item(id=p.id, messages=({"role": "user", "content": p.prompt},)) for p in golden.golden_prompts()]
    return conversation_suite("golden", items, max_new_tokens=decoding.golden_max_new_tokens, version=golden.version())


def holdout_suite(
    items: Sequence[Item], decoding: Decoding, *, longest_expected: int | None = None, longest_reasoning: int | None = None
) -> Suite:
    """Returns the tenant's own items.

    `longest_expected`, `longest_reasoning`: tokens of the longest expected answer and of the longest reasoning before one; half as much
    again, plus 8, is enough for any. If rows have reasoning, its tokens are added to those of the answer.
    """
    return conversation_suite("holdout", items, max_new_tokens=_budget(items, decoding, longest_expected, longest_reasoning))


def scored_suite(
    name: str, version: str, items: Sequence[Item], decoding: Decoding, *, longest_expected: int | None, longest_reasoning: int | None
) -> Suite:
    """Returns a version of a tenant's scored suite; the limits are those of :func:`holdout_suite`, and without any expected answer the
    decoding's."""
    longest = longest_expected if any(item.expected for item in items) else None
    budget = _budget(items, decoding, longest, longest_reasoning)
    return conversation_suite("scored", items, max_new_tokens=budget, version=version, name=f"{SCORED_PREFIX}{name}")


def _budget(items: Sequence[Item], decoding: Decoding, longest_expected: int | None, longest_reasoning: int | None) -> int:
    budget = _max_answer_tokens(longest_expected, decoding.max_new_tokens)
    if any(item.reasoning for item in items):
        budget += _max_answer_tokens(longest_reasoning, MAX_REASONING_TOKENS)
    return budget


def _max_answer_tokens(longest: int | None, most: int) -> int:
    return most if longest is None else min(most, longest + longest // 2 + 8)


def validation_suites(pack_dir: Path, *, limit: int) -> tuple[tuple[Suite, ...], preferences.Kind | None]:
    """Returns the validation part of a pack: ``validation``, and for preferences ``unwanted`` too; a side without examples gives none.

    For pairs, a wanted answer and its unwanted one have the same request id.
    """
    held_out = preferences.held_out(pack_dir, limit=limit)
    sides: tuple[tuple[Kind, list[preferences.Example]], ...] = (("validation", held_out.wanted), ("unwanted", held_out.unwanted))
    return tuple(_loss_suite(kind, examples) for kind, examples in sides if examples), held_out.kind


def _loss_suite(kind: Kind, examples: Sequence[preferences.Example]) -> Suite:
    requested = tuple(
        requests.Loss(id=f"example-{at:05d}", input_ids=tuple(ids), labels=tuple(labels)) for at, (ids, labels) in enumerate(examples)
    )
    return Suite(id=kind, kind=kind, requests=requested, num_items=len(requested))


def spread(num_items: int, limit: int) -> list[int]:
    """Returns at most `limit` of `num_items` indexes, evenly spread, in order: the same every time."""
    if num_items <= limit:
        return list(range(num_items))
    return [at * num_items // limit for at in range(limit)]


def holdout_items(rows: Iterable[JsonObject], *, limit: int = 200, calls: Callable[[], bool] = lambda: False) -> list[Item]:
    """Returns items from validation rows: the turns before the last assistant turn, and that turn's text or tool calls.

    `calls` is asked once, if there are rows that end with tool calls, whether they give items; the calls of the base model's template must
    be readable then (:class:`engine.data.tokens.call_form.CallForm`). Other rows without a textual answer (continued pre-training)
    give none. Above `limit` the choice is by a hash of the item, so it does not depend on the order of rows and stays when rows are added.
    """
    once = functools.cache(calls)
    items: dict[str, Item] = {}
    for row in rows:
        if (item := item_of(row, calls=once)) is not None:
            items[item.id] = item
        if len(items) > 2 * limit:  # never more than that in memory
            items = {id_: items[id_] for id_ in sorted(items)[:limit]}
    return [items[id_] for id_ in sorted(items)[:limit]]


def item_of(row: JsonObject, *, calls: Callable[[], bool]) -> Item | None:
    """Returns the item of one row, as :func:`holdout_items` does; None if it has no answer."""
    if row.get("messages"):
        messages = list(row["messages"])
    elif row.get("prompt") and row.get("completion") and not row.get("rejected"):
        messages = [*_turns(row["prompt"], "user"), *_turns(row["completion"], "assistant")]
    else:
        return None
    answer = messages[-1]
    called = answer.get("tool_calls")
    if len(messages) < 2 or answer.get("role") != "assistant" or (called and not calls()):
        return None
    if not called and not isinstance(answer.get("content"), str):
        return None
    prompt, tools = tuple(messages[:-1]), tuple(row.get("tools") or ())
    text = answer.get("content") or ""
    said = ThinkMarks().split(text)[1]
    expected = tool_calls.canonical([call["function"] for call in called]) if called else said
    inline = text.removesuffix(said)
    reasoning = next((str(answer[name]) for name in REASONING_FIELDS if answer.get(name)), inline)
    kwargs = dict(row.get("chat_template_kwargs") or {})
    more = ({"tools": tools} if tools else {}) | ({"template_kwargs": kwargs} if kwargs else {})
    digest = _sha256({"messages": prompt, "expected": expected} | more)
    return Item(
        id=f"item-{digest[:16]}",
        messages=prompt,
        expected=expected,
        tools=tools,
        reasoning=reasoning,
        template_kwargs=kwargs,
        calls=bool(called),
        schema=_schema(row.get("response_format") or {}),
    )


def _schema(response_format: JsonObject) -> JsonObject | None:
    """Returns the JSON schema of a row's response format; any object satisfies JSON mode."""
    if response_format.get("type") == "json_object":
        return {"type": "object"}
    return dict(response_format["json_schema"]["schema"]) if response_format.get("type") == "json_schema" else None


def _turns(value: str | Sequence[JsonObject], role: str) -> Sequence[JsonObject]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def write_items(items: Iterable[Item], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item.to_dict(), ensure_ascii=False) + "\n" for item in items), encoding="utf-8")


def read_items(path: Path) -> list[Item]:
    with path.open(encoding="utf-8") as lines:
        return [from_json(Item, json.loads(line), ignore_unknown=True) for line in lines if line.strip()]


def is_literal(items: Sequence[Item]) -> bool:
    """Returns whether most expected answers can be compared exactly: JSON, or a few words.

    If not, they are free text, for which an exact match says nothing.
    """
    answers = [item.expected for item in items if item.expected is not None]
    literal = sum(len(a.split()) <= SHORT_ANSWER_WORDS or answer_metrics.json_valid(a) == 1.0 for a in answers)
    return bool(answers) and 2 * literal > len(answers)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()
