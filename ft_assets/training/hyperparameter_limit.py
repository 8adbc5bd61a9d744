"""What one hyperparameter may be, and how that is said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    kind: Literal["int", "float", "word", "flag", "modules"]
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    """The lower limit itself is refused."""
    words: tuple[str, ...] = ()
    allowed: tuple[int, ...] = ()
    because: str = ""

    @property
    def text(self) -> str:
        if self.kind == "modules":
            return "all-linear, or a list of some of " + ", ".join(self.words)
        if self.words:
            return "one of " + ", ".join(self.words)
        if self.kind == "flag":
            return "true or false"
        if self.allowed:
            return "one of " + ", ".join(map(str, self.allowed))
        kind = "a whole number" if self.kind == "int" else "a number"
        low = f"above {self.low:g}" if self.above_low else f"at least {self.low:g}"
        return f"{kind} {low}" + (f" and at most {self.high:g}" if self.high < math.inf else "")

    def accepts(self, value: object) -> bool:
        if self.kind == "word":
            return isinstance(value, str) and value in self.words
        if self.kind == "modules":
            return value == "all-linear" or self._names(value)
        if self.kind == "flag":
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):  # asked of a huge int, isfinite overflows
            return False
        if self.kind == "int" and value != int(value):
            return False
        above = value > self.low if self.above_low else value >= self.low
        return above and value <= self.high and (not self.allowed or int(value) in self.allowed)

    def plain(self, value: Any) -> Any:
        """An accepted `value` in the one form in which it is hashed: 1 and 1.0 are the same number, a list has no order."""
        if self.kind == "int":
            return int(value)
        if self.kind == "float":
            return float(value)
        return tuple(sorted(value)) if isinstance(value, list) else value

    def _names(self, value: object) -> bool:
        """A list of words, each once; empty would train nothing."""
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) for v in value):
            return False
        return set(value) <= set(self.words) and len(set(value)) == len(value)
