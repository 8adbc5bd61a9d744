"""Guesses a text's language from its script and, for Latin letters, the most common words.

Good enough to see that a dataset mixes languages, not to label one text: nearly always right on sentences of ten words or more of the
listed languages, ``unknown`` on single words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_CHARACTERS = 300
"""Characters of a text that are examined."""
MIN_STOP_WORDS = 2
"""Least number of a language's common words in a text; a single one is shared by too many languages."""
UNKNOWN = "unknown"

SCRIPTS: Mapping[str, str] = {
    "ja": "\u3040-\u30ff",
    "ko": "\uac00-\ud7af\u1100-\u11ff",
    "zh": "\u4e00-\u9fff\u3400-\u4dbf",
    "cyrillic": "\u0400-\u04ff",
    "ar": "\u0600-\u06ff\u0750-\u077f",
    "he": "\u0590-\u05ff",
    "el": "\u0370-\u03ff",
    "hi": "\u0900-\u097f",
    "bn": "\u0980-\u09ff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "th": "\u0e00-\u0e7f",
}
"""Ranges of Unicode blocks; ``ja`` comes first because Japanese also uses the characters of ``zh``."""
STOP_WORDS: Mapping[str, str] = {
    "en": "the of and to in is you that it he was for on are with his they at this have from or had by but what all were when "
    "we there can an your which their if do will how about my her would been not i me has please",
    "de": "der die und das nicht von zu ist mit sich auf dem ein eine einen im auch wird bei oder war sind ich sie wir wie "
    "aber nach aus wenn haben kann ihr durch nur noch werden mein es den des",
    "fr": "le les des et est dans que qui pour pas une sur avec ce il elle nous vous sont je plus mais par cette au aux ou "
    "mon ma du se sa ses comme peut fait tout ont",
    "es": "el los las y es en que por una con para no se del su lo como pero le al sus este mi son esta cuando muy hay yo "
    "todo puede tiene sobre si",
    "it": "il lo gli di che e non una per con sono del della le mi si ha come ma anche nel questo al alla piu ho se dei delle "
    "cosa perche puoi e",
    "pt": "o os as e de que em um uma para com nao por mais dos se na no da do ao foi ele ela isso como mas sua meu voce tem "
    "muito ja eu esta pode",
    "nl": "de het een en van ik te dat die in is niet zijn op aan met als voor er maar om dan zou wat mijn men dit zo door "
    "over ze bij ook tot je wordt",
    "pl": "i w nie na to jest sie z do ze jak co ale po tak za od przez czy dla o juz tylko tego moze ma jestem bardzo sa jego",
    "sv": "och att det som en av ar jag pa med den for inte till har de om ett man var du kan vi han men sa eller fran nar hur",
    "tr": "bir ve bu da de icin ile cok ne var ben o gibi daha ama mi olarak sen her kadar en sonra nasil degil olan",
    "id": "yang dan di ini itu dengan untuk tidak dari dalam akan pada juga saya ke adalah karena ada bisa kami mereka sudah atau apa anda",
    "vi": "la va cua co khong trong mot cho duoc nguoi nhung voi toi cac nay de khi da ban thi nhu se lam rat",
}
"""The most common words, without accents."""
LANGUAGES: tuple[str, ...] = (UNKNOWN, *STOP_WORDS, *(name for name in SCRIPTS if name != "cyrillic"), "ru", "uk")
"""All possible results."""
_UKRAINIAN = re.compile("[\u0456\u0457\u0454\u0491]")
_OTHER_THAN_ASCII = re.compile("[^\\x00-\\x7f]")
_SCRIPTS = [(name, re.compile(f"[{span}]")) for name, span in SCRIPTS.items()]
_WORDS = re.compile("[a-z]+")
_OWNERS: dict[str, list[str]] = {}
for _language, _words in STOP_WORDS.items():
    for _word in dict.fromkeys(_words.split()):
        _OWNERS.setdefault(_word, []).append(_language)
_PLAIN = str.maketrans(
    "\u00e0\u00e1\u00e2\u00e3\u00e4\u00e5\u00e7\u00e8\u00e9\u00ea\u00eb\u00ec\u00ed\u00ee\u00ef\u00f1\u00f2\u00f3\u00f4\u00f5\u00f6\u00f9\u00fa\u00fb\u00fc\u0105\u0119\u0142\u015b\u017c\u011f\u0131\u015f",
    "aaaaaaceeeeiiiinooooouuuuaelszgis",
)


def guess_language(text: str) -> str:
    """Returns an ISO 639-1 code, or ``unknown`` for a text that is too short, too mixed or of another language."""
    text = text[:MAX_CHARACTERS]
    if not text.isascii() and (script := _script(text)):
        return script
    scores: dict[str, float] = {}
    held: dict[str, int] = {}
    plain = text.lower() if text.isascii() else text.lower().translate(_PLAIN)
    for word in _OWNERS.keys() & _WORDS.findall(plain):
        for language in (owners := _OWNERS[word]):
            scores[language] = scores.get(language, 0.0) + 1.0 / len(owners)
            held[language] = held.get(language, 0) + 1
    best = sorted(scores, key=lambda language: (-scores[language], language))
    if not best or held[best[0]] < MIN_STOP_WORDS or (len(best) > 1 and scores[best[0]] < 1.2 * scores[best[1]]):
        return UNKNOWN
    return best[0]


def _script(text: str) -> str | None:
    """Returns the language whose script has most of the non-ASCII letters, if they are at least a fifth of the text."""
    beyond = len(_OTHER_THAN_ASCII.findall(text))
    if beyond * 5 < len(text):
        return None
    counts = {name: len(pattern.findall(text)) for name, pattern in _SCRIPTS}
    if counts["ja"] * 10 >= counts["zh"] + counts["ja"] > 0:
        counts["ja"] += counts.pop("zh")
    name = max(counts, key=lambda name: counts[name])
    if counts[name] * 2 < beyond:
        return None
    return ("uk" if _UKRAINIAN.search(text) else "ru") if name == "cyrillic" else name
