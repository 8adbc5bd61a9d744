"""Strings that stand for any content while a template is rendered, and record what the template does with them.

A template that only copies content can be rendered once per sequence of roles and filled in afterwards. A probe is content that proves it:
adding it to other text keeps it whole, stripping it is recorded as a step to repeat, a yes-or-no question is recorded as a condition under
which the rendering holds, and anything else raises :class:`Opaque`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "\ue000", "\ue001"
"""Private-use characters around the number of a probe in its text."""
BODY = "x<&'\"\\aZ  \nq"
"""Changed by any rewriting that does not ask the probe itself: escaping, changing case, collapsing white space."""
PROBE = re.compile(f"{OPEN}(\\d+){re.escape(BODY)}{CLOSE}")


class Opaque(Exception):
    """The template uses content in a way that depends on its characters."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Content of message `index` after `steps`, ``(method, arguments)`` of `str` each."""

    index: int
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def fill(self, content: str) -> str:
        for name, args in self.steps:
            content = getattr(content, name)(*args)
        return content


@dataclass(frozen=True, slots=True)
class Guard:
    """A question whose answer the rendering assumed."""

    slot: Slot
    method: str
    args: tuple[Any, ...]
    answer: bool

    def holds(self, content: str) -> bool:
        content = self.slot.fill(content)
        return (bool(content) if self.method == "__bool__" else bool(getattr(content, self.method)(*self.args))) == self.answer


class Watch:
    """The probes of one rendering and the questions about them."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.guards: dict[Guard, None] = {}

    def probe(self, slot: Slot) -> Probe:
        self.slots.append(slot)
        made = Probe(spell(len(self.slots) - 1))
        made.watch, made.slot = self, slot
        return made


def spell(number: int) -> str:
    return f"{OPEN}{number}{BODY}{CLOSE}"


class Probe(str):
    """Text of unknown characters: one content, or (without a slot) a text that contains some."""

    watch: Watch
    slot: Slot | None

    def _with(self, text: str) -> Probe:
        made = Probe(text)
        made.watch, made.slot = self.watch, None
        return made

    def __add__(self, other: Any) -> Any:
        return self._with(str.__str__(self) + str.__str__(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return self._with(str.__str__(other) + str.__str__(self)) if isinstance(other, str) else NotImplemented

    def __str__(self) -> str:
        return "".join((str.__str__(self), ""))

    def __iter__(self) -> Iterator[str]:
        raise Opaque("iterated over")
        yield ""  # a generator: checking whether it is iterable is allowed

    def __hash__(self) -> int:
        raise Opaque("hashed")

    def _step(self, name: str, args: tuple[Any, ...]) -> Probe:
        if self.slot is None or any(isinstance(a, Probe) for a in args):
            raise Opaque(name)
        return self.watch.probe(Slot(self.slot.index, (*self.slot.steps, (name, args))))

    def _ask(self, name: str, args: tuple[Any, ...]) -> bool:
        if self.slot is None or any(isinstance(a, Probe) for a in args):
            raise Opaque(name)
        plain = str.__str__(self)[len(OPEN) : -len(CLOSE)]
        answer = bool(plain) if name == "__bool__" else getattr(plain, name)(*args)
        if answer is NotImplemented:
            raise Opaque(name)
        self.watch.guards[Guard(self.slot, name, args, bool(answer))] = None
        return bool(answer)


def _remembered(name: str) -> Any:
    def method(self: Probe, *args: Any) -> Probe:
        return self._step(name, args)

    return method


def _answered(name: str) -> Any:
    def method(self: Probe, *args: Any) -> bool:
        return self._ask(name, args)

    return method


def _refused(name: str) -> Any:
    def method(_: Probe, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise Opaque(name)

    return method


STEPS = ("strip", "lstrip", "rstrip")
QUESTIONS = ("startswith", "endswith", "__contains__", "__eq__", "__ne__", "__bool__")
_kept = {
    *STEPS, *QUESTIONS, "__add__", "__radd__", "__str__", "__iter__", "__hash__", "__new__", "__init__", "__class__", "__getattribute__",
    "__init_subclass__", "__subclasshook__", "__doc__", "__getstate__", "__dir__",
}  # fmt: skip
_inherited = {"__lt__", "__le__", "__gt__", "__ge__", "__format__"}
for _name in STEPS:
    setattr(Probe, _name, _remembered(_name))
for _name in QUESTIONS:
    setattr(Probe, _name, _answered(_name))
for _name in ({*dir(str)} | {"__rmod__", "__rmul__", "__html__"}) - _kept - {*dir(object)} | _inherited:
    setattr(Probe, _name, _refused(_name))
