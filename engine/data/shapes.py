"""Recognises the accepted row shapes and converts each to an :class:`Example`, reporting every field that is wrong.

chat               {"messages": [...], "tools"?: [...], "enable_thinking"?: bool, "chat_template_kwargs"?: {...},
                    "response_format"?: {...}}
                   {"conversations": [{"from": "human", "value": "..."}, ...]} (ShareGPT)
prompt_completion  {"prompt": text or messages, "completion": text or messages}
                   {"instruction": "...", "input"?: "...", "output": "..."} (Alpaca)
preference         {"prompt": text or messages, "chosen", "rejected"}; without prompt, messages in chosen and rejected that
                   share their first turns; or LLaMA-Factory's {"conversations": [...], "chosen": {...}, "rejected": {...}} and
                   {"instruction": "...", "input"?: "...", "chosen": "...", "rejected": "..."};
                   or {"input": {"messages"}, "preferred_output", "non_preferred_output"}
kto                {"prompt", "completion", "label": true or false}
text               {"text": "..."}

Each may have `split`, and `weight`: 0 leaves the row out.

A text that holds a whole conversation is refused, with the column map that splits it: guessing would train on the marks.
"""

from __future__ import annotations

import itertools
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from core.typed_json import JsonObject
from engine.data.fields import (
    JUDGED,
    MAX_MESSAGES,
    MESSAGE_FIELDS,
    PART_FIELDS,
    RESPONSE_FORMAT,
    SHAREGPT_FIELDS,
    TEMPLATE_KWARGS,
    THINKING,
    Reading,
    TooManyProblemsError,
    fields_of_calls,
    truth,
)
from engine.data.problems import Problem
from engine.data.readers.column_map import Mapped
from engine.data.readers.free_form import ANSWERS, TURNS, holds_messages, parse_text
from engine.data.readers.transcripts import begins_as_transcript, transcript_marks
from engine.data.schema import Example, Format, Message

BESIDE_MESSAGES = ("tools", "functions", "parallel_tool_calls", TEMPLATE_KWARGS, THINKING, RESPONSE_FORMAT)
"""Fields of a row beside its messages: those that its chat template reads, and the form that evaluations check answers for."""
FROM_OPENAI = ("preferred_output", "non_preferred_output")
WEIGHT = "weight"
"""Field of any row: 0 leaves it out."""
ALPACA = ("instruction", "input", "history", "system")
"""Fields of Alpaca's prompt: unused beside another prompt."""
OF_INPUT = frozenset(("messages", "tools", "functions", "parallel_tool_calls"))
"""Fields of `input` in OpenAI's preference rows."""
MESSAGES = frozenset(("messages", "conversations", "prompt", "completion", "chosen", "rejected", *FROM_OPENAI, "input"))
"""Fields that may hold messages."""
READ_WITH_MESSAGES = frozenset(("conversations", "system", "chosen", "rejected", *BESIDE_MESSAGES, WEIGHT))
"""Fields that change what a row with `messages` means."""
TEXTS: Mapping[Format, tuple[str, ...]] = {
    "chat": (),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected", *FROM_OPENAI),
    "kto": ("prompt", "completion"),
    "text": ("text",),
}
"""Fields that may be a text, and so may hold a transcript."""
ASKING = (
    "question", "query", "instruction", "prompt", "input", "source", "utterance", "problem", "user", "frage", "anfrage", "eingabe",
    "pregunta", "domanda", "text",
)  # fmt: skip
ANSWERING = (
    "answer", "response", "output", "completion", "reply", "target", "ground_truth", "solution", "assistant", "antwort", "ausgabe",
    "reponse", "respuesta", "risposta", "label", "category", "intent",
)  # fmt: skip
"""Column names, in order of preference, that the suggested map uses for prompt and completion."""
INDEX = re.compile(r"\[\d+\]")
NO_TEXT = frozenset(("id", "uuid", "split", "url", "source_url", "timestamp", "date", "created_at", "updated_at"))
"""Column names that are neither."""


def detect_shape(value: JsonObject) -> tuple[Format, str] | None:
    """Returns the format of a row and the reason in words; None for an unknown shape."""

    def has(*names: str) -> bool:
        return all(value.get(name) is not None for name in names)

    if has("chosen", "rejected"):
        return "preference", "rows have 'chosen' and 'rejected'"
    if has("messages"):
        return "chat", "rows have 'messages'"
    if has("preferred_output") or has("non_preferred_output"):
        return "preference", "rows have 'preferred_output' and 'non_preferred_output'"
    if has("conversations"):
        return "chat", "rows have 'conversations' (ShareGPT): 'from' is the role, 'value' the content"
    if has("prompt", "completion"):
        if value.get("label") is not None:
            return "kto", "rows have 'prompt' and 'completion', and 'label' says whether the completion is good"
        return "prompt_completion", "rows have 'prompt' and 'completion'"
    if has("instruction", "output"):
        with_input = ", followed by an empty line and 'input' where there is one"
        return "prompt_completion", f"rows have 'instruction' and 'output' (Alpaca): the prompt is 'instruction'{with_input}"
    if has("text"):
        others = _other_texts(value)
        return "text", "rows have 'text'" + (f", and {', '.join(map(ascii, others[:3]))} is read by nothing" if others else "")
    return None


def advice(value: JsonObject) -> tuple[str, str] | None:
    """Returns (code, message) of a warning for a row that is parsed as text, but whose only other text column looks like its answer."""
    if isinstance(value, Mapped) or "text" not in value:
        return None
    found = detect_shape(value)
    others = _other_texts(value) if found is not None and found[0] == "text" else []
    if len(others) != 1:
        return None
    name = others[0][:80]
    message = f"{name!a} is read by nothing; to train it as the answer: --map text=prompt,{name}=completion"
    return "unread_text_column", f"{message}; to train on the text alone: --map text=text"


def messages_as_text(value: JsonObject, fmt: Format) -> bool:
    """Returns whether a prompt or an answer is JSON that holds messages, and is read as text because another one holds none."""
    if fmt not in ("prompt_completion", "kto", "preference"):
        return False
    sides = (value.get(name) for name in (TURNS | ANSWERS) & _used(value, fmt))
    return any(isinstance(side, str) and holds_messages(parse_text(side)) for side in sides)


def unknown_shape(value: JsonObject) -> Problem:
    have = ", ".join(sorted(ascii(str(k))[1:-1][:40] for k in value)[:12]) or "no fields"
    options = "" if isinstance(value, Mapped) else _mapping(value)
    fix = f"map the columns: {options}" if options else "rename the fields, or map columns as in --map text=prompt,category=completion"
    message = f"has {have}; rows need 'messages', 'prompt' and 'completion', 'chosen' and 'rejected', or 'text'"
    return Problem("unknown_row_shape", message, fix=fix, options=options)


def _mapping(value: JsonObject) -> str:
    """Returns the ``--map`` that makes a row of another shape readable, by the names and lengths of its columns; empty if none is likely.

    1. A column that holds messages.
    2. Two columns of text: the one named like a question and the one named like an answer.
    3. If a name is not conclusive, the longest of the other texts, in the order of the file.
    """
    names = [k for k in value if not set(k) & set(",\n\r") and k == k.strip() and k]
    if (messages := next((k for k in names if _is_conversation(parse_text(value[k]))), None)) is not None:
        return f"--map {shlex.quote(f'{messages}=messages')}"
    texts = [k for k in names if isinstance(value[k], str) and k.casefold() not in NO_TEXT]
    asking, answering = _first_named(texts, ASKING), _first_named(texts, ANSWERING)
    others = sorted((k for k in texts if k not in (asking, answering)), key=lambda k: -len(value[k]))
    if asking is None and answering is None:
        pair = sorted(others[:2], key=texts.index)
    else:
        pair = [name for name in (asking or next(iter(others), None), answering or next(iter(others), None)) if name is not None]
    return f"--map {shlex.quote(f'{pair[0]}=prompt,{pair[1]}=completion')}" if len(pair) == 2 else ""


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and holds_messages(value)


def _first_named(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Returns the column with the first of `names`, ignoring case and accents."""
    plain = {_plain_name(column): column for column in reversed(columns)}
    return next((plain[name] for name in names if name in plain), None)


def _plain_name(name: str) -> str:
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c)).replace(" ", "_").replace("-", "_")


def to_example(value: JsonObject, fmt: Format, *, row: int) -> tuple[Example | None, list[Problem]]:
    """Returns the example that `value` gives in format `fmt`, or None with its problems."""
    if (problem := _transcript_problem(value, fmt)) is not None:
        return None, [problem]
    reading = Reading()
    try:
        example = CONVERT[fmt](reading, value, row)
    except TooManyProblemsError:
        return None, reading.problems
    return (None, reading.problems) if reading.problems else (example, [])


def _chat(reading: Reading, value: JsonObject, row: int) -> Example:
    name = "messages" if value.get("messages") is not None else "conversations"
    messages = _system(reading, value) + reading.messages(value.get(name), name)
    return _example(reading, value, messages, row)


def _completion(reading: Reading, value: JsonObject, row: int) -> Example:
    if value.get("prompt") is None and value.get("instruction") is not None:
        return _alpaca(reading, value, row)
    prompt = _system(reading, value) + tuple([_unweighted(m) for m in reading.turns(value.get("prompt"), "prompt", "user")])
    completion = reading.turns(value.get("completion"), "completion", "assistant")
    return _example(reading, value, prompt + completion, row)


def _alpaca(reading: Reading, value: JsonObject, row: int) -> Example:
    answer = Message(role="assistant", content=reading.text(value.get("output"), "output"))
    return _example(reading, value, (*_alpaca_prompt(reading, value), answer), row)


def _example(reading: Reading, value: JsonObject, messages: tuple[Message, ...], row: int) -> Example:
    return Example(
        kind="chat",
        messages=messages,
        tools=reading.tools(value),
        template_kwargs=reading.template_kwargs(value),
        response_format=reading.response_format(value),
        row=row,
    )


def _alpaca_prompt(reading: Reading, value: JsonObject) -> tuple[Message, ...]:
    requested = reading.text(value["instruction"], "instruction")
    more = reading.text(value["input"], "input") if value.get("input") is not None else ""
    question = Message(role="user", content=f"{requested}\n\n{more}" if more.strip() else requested)
    return (*_system(reading, value), *_history(reading, value.get("history")), question)


def _history(reading: Reading, value: Any) -> list[Message]:
    """Parses earlier pairs of question and answer in LLaMA-Factory's form; the answers carry no loss, as in any prompt."""
    out: list[Message] = []
    if isinstance(reading.decoded(value, "history"), Problem):
        return out
    pairs = value if isinstance(value, list) else [value] if value is not None else []
    if 2 * len(pairs) > MAX_MESSAGES:
        reading.too_many_messages("history", 2 * len(pairs))
        return out
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            reading.add(
                f"history[{index}]", "wrong_type", "a turn of history is not a pair of texts", 'write [["question", "answer"], ...]'
            )
            continue
        out.append(Message(role="user", content=reading.text(pair[0], f"history[{index}][0]")))
        out.append(Message(role="assistant", content=reading.text(pair[1], f"history[{index}][1]"), weight=0))
    return out


def _kto(reading: Reading, value: JsonObject, row: int) -> Example:
    example = _completion(reading, value, row)
    label = reading.flag(value["label"], "label", words=JUDGED, code="invalid_label")
    return msgspec.structs.replace(example, kind="kto", label=label)


def _preference(reading: Reading, value: JsonObject, row: int) -> Example:
    names, tools, path = ("chosen", "rejected"), value, ""
    if not all(value.get(n) is not None for n in names):
        given = value.get("input")
        names, path = FROM_OPENAI, "input."
        tools = given if isinstance(given, dict) else value
        prompt = reading.messages(given.get("messages"), "input.messages") if isinstance(given, dict) else reading.messages(given, "input")
    else:
        prompt = _preference_prompt(reading, value)
    chosen, rejected = (_after(prompt, reading.turns(value.get(n), n, "assistant")) for n in names)
    if not prompt and not reading.problems:
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1], strict=False))))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            _report_no_prompt(reading, value)
    return Example(
        kind="preference",
        messages=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=reading.tools(tools, path if tools is not value else ""),
        template_kwargs=reading.template_kwargs(value),
        response_format=reading.response_format(value),
        row=row,
    )


def _after(prompt: tuple[Message, ...], answer: tuple[Message, ...]) -> tuple[Message, ...]:
    """Returns an answer without the prompt, which many datasets repeat in it."""
    return answer[len(prompt) :] if len(answer) > len(prompt) and answer[: len(prompt)] == prompt else answer


def _preference_prompt(reading: Reading, value: JsonObject) -> tuple[Message, ...]:
    """Returns what both answers continue: `prompt`; or, in LLaMA-Factory's form, the conversation or the instruction beside them."""
    if value.get("prompt") is not None:
        return (*_system(reading, value), *reading.turns(value["prompt"], "prompt", "user"))
    name = next((n for n in ("conversations", "messages") if value.get(n) is not None), None)
    if name is not None:
        turns = reading.messages(value[name], name)
        return (*_system(reading, value), *turns) if turns and turns[-1].role != "assistant" else ()  # otherwise it already has an answer
    return _alpaca_prompt(reading, value) if value.get("instruction") is not None else ()


def _report_no_prompt(reading: Reading, value: JsonObject) -> None:
    if (name := next((n for n in ("conversations", "messages") if value.get(n)), None)) is not None:
        message = f"{name!r} ends with an answer, and chosen and rejected are answers too"
        reading.add(name, "missing_field", message, f"end {name!r} with the user's message")
        return
    asking = next((name for name in ASKING if isinstance(value.get(name), str)), None)
    options = f"--map {asking}=prompt,chosen=chosen,rejected=rejected" if asking else ""
    fix = f"map it: {options}" if options else "add 'prompt'"
    reading.add(
        "prompt", "missing_field", "prompt is missing, and chosen and rejected do not start with the same messages", fix, options=options
    )


def _text(reading: Reading, value: JsonObject, row: int) -> Example:
    return Example(kind="text", text=reading.text(value.get("text"), "text"), row=row)


CONVERT: Mapping[Format, Callable[[Reading, JsonObject, int], Example]] = {
    "chat": _chat,
    "prompt_completion": _completion,
    "preference": _preference,
    "kto": _kto,
    "text": _text,
}


def _system(reading: Reading, value: JsonObject) -> tuple[Message, ...]:
    """Returns the first message, if `system` is beside the conversation."""
    system = value.get("system")
    return () if system is None or system == "" else (Message(role="system", content=reading.text(system, "system")),)


def is_left_out(value: JsonObject) -> bool | Problem:
    """Returns whether the row's own weight leaves it out; a problem for a weight that is neither 0 nor 1."""
    given = value.get(WEIGHT)
    known = None if isinstance(given, bool) else truth(given, {"0": False, "0.0": False, "1": True, "1.0": True})
    if given is None or (isinstance(given, str) and not given.strip()) or known is not None:
        return known is False
    message = f"the row's weight is {ascii(given)[:60]}"
    return Problem("invalid_weight", message, path=WEIGHT, fix="use 0 (leave the row out) or 1: rows are not weighted; or rename the field")


def _unweighted(message: Message) -> Message:
    """Sets weight 0: an assistant turn inside a prompt carries no loss."""
    if message.role != "assistant":
        return message
    return msgspec.structs.replace(message, weight=0)


def _other_texts(value: JsonObject) -> list[str]:
    return [str(k) for k, v in value.items() if k not in ("text", "split", "id") and isinstance(v, str)]


def _transcript_problem(value: JsonObject, fmt: Format) -> Problem | None:
    """Returns the refusal of a row one of whose texts is a whole conversation, with the map that splits them all."""
    marks: dict[str, str] = {}
    for name in TEXTS[fmt]:
        text = value.get(name)
        if isinstance(text, str) and begins_as_transcript(text) and (found := transcript_marks(text)) is not None:
            marks[name] = found
    if not marks or (fmt == "text" and isinstance(value, Mapped)):
        return None
    name, found = next(iter(marks.items()))
    if fmt == "text":
        source = _source(value, "text")
        options = f"--map {shlex.quote(f'{source}=messages:transcript')}"
        fix = f"split it with {options}, or train on the plain text with --map {source}=text"
    else:
        kept = (n for n in (*TEXTS[fmt], "label", *BESIDE_MESSAGES, "input") if value.get(n) is not None and n in _used(value, fmt))
        mapped = ",".join(f"{_source(value, n)}={n}{':transcript' if n in marks else ''}" for n in kept)
        options = f"--map {shlex.quote(mapped)}"
        fix = f"split it with {options}"
    message = f"'{name}' holds a whole conversation written as text with {found} turns"
    return Problem("transcript_text", message, path=name, fix=fix, options=options)


def _source(value: JsonObject, field: str) -> str:
    """Returns the column of the file that `field` came from."""
    return value.sources.get(field, field) if isinstance(value, Mapped) else field


def unknown_fields(value: JsonObject, fmt: Format) -> list[str]:
    """Returns the fields of the row, its messages, their parts and calls that are not used, except empty ones."""
    used = _used(value, fmt)
    found = [str(k) for k, v in value.items() if k not in used and not is_empty(v)]
    for name in sorted(used & MESSAGES):
        found += _unknown_in(value.get(name), name) if name != "input" or isinstance(value.get(name), list) else ()
    if isinstance(given := value.get("input"), dict) and "input" in used:
        found += [f"input.{k}" for k, v in given.items() if k not in OF_INPUT and not is_empty(v)]
        found += _unknown_in(given.get("messages"), "input.messages")
    return found


def is_empty(value: Any) -> bool:
    """Returns whether a field says nothing."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def _used(value: JsonObject, fmt: Format) -> frozenset[str]:
    """Returns the fields that the conversion of this row reads."""
    if fmt == "text":
        return frozenset(("text", WEIGHT))
    beside = (*BESIDE_MESSAGES, WEIGHT)
    if fmt == "preference" and not all(value.get(name) is not None for name in ("chosen", "rejected")):
        own_tools = ("tools", "functions", "parallel_tool_calls") if isinstance(value.get("input"), dict) else ()
        return frozenset((*FROM_OPENAI, "input", *beside)) - frozenset(own_tools)
    conversation = next((name for name in ("messages", "conversations") if value.get(name) is not None), None)
    if fmt == "chat":
        return frozenset((str(conversation), "system", *beside))
    answers = ("chosen", "rejected") if fmt == "preference" else ("completion", *(("label",) if fmt == "kto" else ()))
    if value.get("prompt") is not None:
        return frozenset(("prompt", "system", *answers, *beside))
    if fmt == "preference" and conversation is not None:
        name = "conversations" if value.get("conversations") is not None else conversation
        return frozenset((name, "system", *answers, *beside))
    if value.get("instruction") is not None:
        return frozenset((*ALPACA, *(answers if fmt == "preference" else ("output",)), *beside))
    return frozenset((*answers, *beside))


def _unknown_in(value: Any, path: str) -> Iterator[str]:
    """Yields the fields of messages that are not used."""
    for message in value if isinstance(value, list) else [value]:
        if not isinstance(message, dict):
            continue
        known = SHAREGPT_FIELDS if message.get("role") is None and "from" in message else MESSAGE_FIELDS
        yield from _extra(message, known, f"{path}[]")
        for part in content if isinstance(content := message.get("content"), list) else ():
            yield from _extra(part, PART_FIELDS, f"{path}[].content[]")
        for place, fields, names in fields_of_calls(message):
            yield from _extra(fields, names, f"{path}[].{INDEX.sub('[]', place)}")


def _extra(value: Any, known: frozenset[str], path: str) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, dict) else ():
        if name not in known and not is_empty(item):
            yield f"{path}.{name}"
