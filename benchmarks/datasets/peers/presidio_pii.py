"""Finds personal data with presidio's pattern recognizers, without a language model: `python presidio_pii.py TEXTS RESULT default`."""

# The peer is installed in an environment of its own.
# mypy: ignore-errors

import json
import resource
import sys
from importlib.metadata import version
from pathlib import Path

import tldextract

tldextract.extract = tldextract.TLDExtract(suffix_list_urls=())  # the list that it ships: no network

from presidio_analyzer.predefined_recognizers import (  # noqa: E402
    CreditCardRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    PhoneRecognizer,
    UsSsnRecognizer,
)

MIN_SCORE = 0.3
"""Below this lie patterns that presidio itself calls weak, such as nine digits as a social security number."""


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(texts: str, result: str, _settings: str) -> None:
    kinds = (EmailRecognizer, PhoneRecognizer, CreditCardRecognizer, IbanRecognizer, UsSsnRecognizer, IpRecognizer)
    recognizers = [kind() for kind in kinds]
    with open(texts) as lines:
        rows = [(int(row["id"]), row["text"]) for row in map(json.loads, lines)]
    for recognizer in recognizers:
        recognizer.analyze(rows[0][1], recognizer.supported_entities, None)
    start = cpu_seconds()
    found: dict[int, list[str]] = {}
    for row, text in rows:
        for recognizer in recognizers:
            if any(hit.score >= MIN_SCORE for hit in recognizer.analyze(text, recognizer.supported_entities, None)):
                found.setdefault(row, []).append(recognizer.supported_entities[0])
    cpu_s = cpu_seconds() - start
    settings = f"6 pattern recognizers (no recognizer of keys), score >= {MIN_SCORE}"
    document = {"version": version("presidio-analyzer"), "rows": len(rows), "cpu_s": cpu_s, "found": found, "settings": settings}
    Path(result).write_text(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
