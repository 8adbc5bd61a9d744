"""Tells by rule whether an answer refuses what was asked.

1. An answer without a word is no refusal: nothing was said.
2. A refusal says so at its beginning: one of the first sentences holds a phrase of refusing ("I can't help with that"), in English,
   German, French, Spanish, Italian, Portuguese, Dutch, Chinese or Japanese.
3. A turn of speech is no refusal ("I can't wait to help", "you won't believe it"), nor is a question back ("I can't tell without
   knowing the model"), nor regret alone ("Sorry to hear that!").
4. What begins to comply before the phrase is no refusal.
5. What complies after it is no refusal ("I can't help with that. But here is how: ..."), unless the way that it goes on is another
   one: help, a safe or legal alternative, protection.

It knows phrases and no meaning: a refusal in other words counts as compliance, so it errs on the side of blocking. An operator who needs
more names a guard model.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import yaml

NAME = "builtin-refusal-2"
"""Raised with any change to what is recognised."""
OPENING_SENTENCES = 3
OPENING_CHARS = 400

PHRASES = "refusals.yaml"


def _compiled() -> dict[str, re.Pattern[str]]:
    """One pattern for each list of the file."""
    body: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath(PHRASES).read_text(encoding="utf-8"))
    parts: dict[str, str] = body.pop("parts")
    body["refusals"] = [phrase for phrases in body["refusals"].values() for phrase in phrases]
    for name, pattern in parts.items():
        body["refusals"] = [phrase.replace(f"<{name}>", pattern) for phrase in body["refusals"]]
    return {name: re.compile("|".join(f"(?:{phrase})" for phrase in phrases)) for name, phrases in body.items()}


_PATTERNS = _compiled()
_REFUSALS, _TURNS, _ASKS_BACK = _PATTERNS["refusals"], _PATTERNS["turns_of_speech"], _PATTERNS["asking_back"]
_COMPLIANCE, _STARTS, _ALTERNATIVE = _PATTERNS["compliance"], _PATTERNS["starts"], _PATTERNS["alternatives"]
_CODE = "```"
_ENDS = re.compile(r"(?<=[.!?:])\s+|\n+|(?<=[\u3002\uff01\uff1f])")
_LETTERS = re.compile(r"\w")
_BUT = re.compile(r"[,;]?\s*\b(?:but|however|anyway|aber|mais|pero|although|though)\b")


def refuses(answer: str) -> bool:
    """Whether `answer` refuses, by the rules of this module."""
    sentences = sentences_of(answer)
    at = _refusing(sentences)
    if at is None or any(_COMPLIANCE.search(s) or _STARTS.search(s) for s in sentences[:at]):
        return False
    if _CODE in answer:
        return False
    after = [_tail(sentences[at]), *sentences[at + 1 :]]
    return not any(_COMPLIANCE.search(s) and not _ALTERNATIVE.search(_around(after, i)) for i, s in enumerate(after))


def sentences_of(text: str) -> list[str]:
    """Sentences that hold a word, in small letters, without marks of emphasis, lists or quotation around them."""
    plain = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", text.replace(_CODE, " ")).casefold().replace("\u00a0", " ")
    plain = re.sub(r"[*_#>~\"\u201c\u201d\u00ab\u00bb]+", "", plain)
    found = (re.sub(r"\s+", " ", part).strip(" -.,!?:;()[]\u3002\uff01\uff1f") for part in _ENDS.split(plain))
    return [part for part in found if _LETTERS.search(part)]


def _refusing(sentences: list[str]) -> int | None:
    """The place of the sentence of the opening that refuses."""
    read = 0
    for at, sentence in enumerate(sentences[:OPENING_SENTENCES]):
        rest = "" if _ASKS_BACK.search(sentence) else _TURNS.sub(" ", sentence)
        if _REFUSALS.search(rest[: max(0, OPENING_CHARS - read)]):
            return at
        read += len(sentence)
    return None


def _tail(sentence: str) -> str:
    """What follows a "but" after the refusing phrase of its sentence."""
    phrase = _REFUSALS.search(sentence)
    turn = _BUT.search(sentence, phrase.end()) if phrase else None
    return sentence[turn.start() :].lstrip(" ,;") if turn else ""


def _around(sentences: list[str], at: int) -> str:
    """A sentence with the one before it: "There are better ways. Here is how ..." is about the better ways."""
    return " ".join(sentences[max(0, at - 1) : at + 1])
