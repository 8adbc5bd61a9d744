"""The internal form of a training example: every accepted row is converted to it, and every later stage reads it.

Prompt/completion rows become a user and an assistant message, so that training sees exactly what chat completions will send; prompts with
assistant turns give them weight 0. There are four kinds: ``chat``, ``preference``, ``kto``, ``text``.

Fields are declared in alphabetical order, in which :func:`canonical` writes them: another order would make new dataset ids.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from core.typed_json import JsonObject

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning in rows and in chat templates: DeepSeek's and Qwen's, gpt-oss's, vLLM's and OpenRouter's."""
TemplateValue = bool | int | float | str
"""Value of a chat template's own variable."""
Kind = Literal["chat", "preference", "kto", "text"]
Format = Literal["chat", "prompt_completion", "preference", "kto", "text"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tool call of the assistant; `arguments` is the parsed object, which chat templates expect."""

    arguments: JsonObject
    id: str | None = None
    name: str

    def as_template(self) -> JsonObject:
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One turn. `weight` 0 excludes an assistant message from the loss; on other roles it has no effect."""

    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    """The assistant's reasoning before its answer; in rows, one of :data:`REASONING_FIELDS`."""
    role: Role
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    weight: int = 1

    def as_template(self) -> JsonObject:
        """Returns the message as passed to a chat template: absent fields are absent, not null; reasoning has all of its names.

        Beside calls, absent content is an empty text, as vLLM passes it: templates that add content to other text would fail otherwise.
        """
        out: dict[str, object] = {"role": self.role}
        if self.reasoning is not None:
            out |= dict.fromkeys(REASONING_FIELDS, self.reasoning)
        if self.content is not None or self.tool_calls:
            out["content"] = self.content or ""
        out |= {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
        if self.tool_calls:
            out["tool_calls"] = [c.as_template() for c in self.tool_calls]
        return out


class Example(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One training example.

    chat: `messages`, ending with the assistant. preference: `messages` is the prompt, `chosen` and `rejected` continue it. kto: a chat
    whose answer has a `label`, good or bad. text: `text`. `row` is the row of the uploaded file, for messages about it; it is not part of
    the content.
    """

    chosen: tuple[Message, ...] = ()
    kind: Kind
    label: bool | None = None
    messages: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    response_format: JsonObject = {}
    """The form that the answer must have, as in OpenAI's API: evaluations check answers against its JSON schema. Not rendered."""
    row: int = 0
    template_kwargs: dict[str, TemplateValue] = {}
    """Variables for the chat template, such as ``enable_thinking``, as the row gives them and as inference must send them."""
    text: str | None = None
    tools: tuple[JsonObject, ...] = ()

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the last answer of a chat, or the whole prompt of a preference."""
        return self.messages if self.kind == "preference" else self.messages[:-1]

    @property
    def answer(self) -> str:
        """The answer that the example teaches: the last assistant message, or the chosen one; empty for text."""
        turns = self.chosen if self.kind == "preference" else self.messages
        return (turns[-1].content or "") if turns else ""

    def all_messages(self) -> tuple[Message, ...]:
        return (*self.messages, *self.chosen, *self.rejected) if self.chosen or self.rejected else self.messages

    def uses_tools(self) -> bool:
        """Returns whether the example offers tools, calls them or has results of them."""
        return bool(self.tools) or any(message.tool_calls or message.role == "tool" for message in self.all_messages())

    def as_row(self) -> JsonObject:
        """Returns the row of a conversation that ends with the wanted answer; without messages for one labeled bad, and for text."""
        wanted = () if self.kind == "kto" and not self.label else (*self.messages, *self.chosen)
        row: dict[str, object] = {"messages": [m.as_template() for m in wanted], "tools": list(self.tools)}
        row |= {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        return row | ({"response_format": self.response_format} if self.response_format else {})

    def num_characters(self) -> int:
        total = len(self.text or "")
        for message in self.messages if self.kind != "preference" else self.all_messages():
            total += len(message.content or "") + len(message.reasoning or "")
        return total


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Example)


def canonical(example: Example) -> bytes:
    """Returns the canonical form of an example's content (without its row number), which is stored and hashed.

    A tenant's own objects (tools, arguments, schemas) keep the order of their keys, because the model learns it.
    """
    return _encoder.encode(msgspec.structs.replace(example, row=0) if example.row else example)


def parse_canonical(data: bytes | str, *, row: int = 0) -> Example:
    """Inverse of :func:`canonical`, with the row number restored."""
    example = _decoder.decode(data)
    return msgspec.structs.replace(example, row=row) if row else example
