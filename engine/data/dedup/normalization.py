"""Normal form of rows for near-duplicate and contamination checks: ignores case, compatibility forms and spacing."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.schema import Example, Message


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a read-only view of `array`, like a mapped one: kernels are compiled once for both."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class CodePoints:
    """Texts as one array of code points: text `i` is ``codes[offsets[i] : offsets[i + 1]]``. The arrays become read-only."""

    codes: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    """One more entry than there are texts; starts at 0."""

    def __post_init__(self) -> None:
        for name, dtype in (("codes", np.uint32), ("offsets", np.int64)):
            object.__setattr__(self, name, read_only(np.ascontiguousarray(getattr(self, name), dtype=dtype)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, i: int) -> str:
        """Returns text `i` as a string, for messages and tests."""
        return self.codes[self.offsets[i] : self.offsets[i + 1]].tobytes().decode("utf-32-le", "surrogatepass")


def near_text(example: Example) -> str:
    """Returns the compared text of an example: everything except system messages, which whole files share word for word.

    Tool calls count as their name and arguments; without them, two questions answered by different calls would be equal.
    """
    if example.text is not None:
        return example.text
    return "\n".join(part for message in example.all_messages() if message.role != "system" for part in _parts(message))


def _parts(message: Message) -> list[str]:
    parts = [text for text in (message.reasoning, message.content) if text]
    parts += [f"{call.name} {json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)}" for call in message.tool_calls]
    return parts


def fold(texts: Sequence[str]) -> CodePoints:
    """Returns `texts` after NFKC, case folding, and white space collapsed to single spaces and stripped, as code points.

    Equal to ``" ".join(unicodedata.normalize("NFKC", text).casefold().split())`` for every text, including lone surrogates.
    """
    from engine.data.dedup import kernels

    parts = [text if text.isascii() else unicodedata.normalize("NFKC", text).casefold() for text in texts]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=offsets[1:])
    raw = CodePoints(np.frombuffer("".join(parts).encode("utf-32-le", "surrogatepass"), np.uint32), offsets)
    out, out_offsets = np.empty(len(raw.codes), np.uint32), np.zeros(len(parts) + 1, np.int64)
    written = kernels.fold_codes(raw.codes, raw.offsets, out, out_offsets)
    return CodePoints(out[:written], out_offsets)
