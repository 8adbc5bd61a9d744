"""A check of another distribution: its option, its findings and its section of the report, through the whole validation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from core.errors import InvalidRequest
from engine.data import checks
from engine.data.ingest import IngestResult, Policies, validate_file
from engine.data.policies import policy_options
from engine.data.report.report_text import report_lines
from tests.engine.data.examples_of import chat

REPOSITORY = Path(__file__).parents[4]
SHOUTS = '''
from collections import Counter

import numpy as np

from engine.data.checks.check import Check, Finding, Option


class Letters:
    """Upper-case letters by letter."""

    def __init__(self, texts):
        self.counts = Counter(c for text in texts for c in text if c.isupper())

    def merge(self, other, /):
        self.counts += other.counts


class Shouting(Check):
    name = "shouting"
    options = (
        Option("shouting", ("off", "warn", "drop", "review", "fail"), help="rows in capitals"),
        Option("shouting_share", 0.8, help="share of capitals from which a row shouts"),
    )
    findings = (
        Finding("shouts", "a row in capitals", plural="shouting", words="written in capitals"),
        Finding("silent", "a row that says nothing", message="says {what}", fix="say more than {what}"),
    )

    def screen(self, rows, result):
        silent = [row for row in rows if row.example.answer == "..."]
        for row in silent:
            result.refuse(row, [self.findings[1].problem(path="messages", what="...")])
        result.totals["shouting.seen"] += len(rows)
        return [row for row in rows if row not in silent]

    def measure(self, kept, result):
        result.tallies[self.name] = Letters(kept.texts)
        return {"shouting": np.array([sum(map(str.isupper, text)) / max(len(text), 1) for text in kept.texts], np.float32)}

    def decide(self, decision):
        share = decision.columns.read("shouting")
        found = np.flatnonzero(decision.keep & (share >= self.policies.shouting_share))
        decision.flag("shouts", "shouting", found, self.action, share=share[found])

    def stats(self, total, decision):
        letters = total.tallies[self.name].counts if self.is_on else {}
        counts = {"flagged": decision.counts["shouting"], "seen": total.totals["shouting.seen"], "letters": sum(letters.values())}
        return {"shouting": counts}

    @classmethod
    def lines(cls, stats):
        return [f"shouting: {stats['shouting']['flagged']} rows"] if stats["shouting"]["seen"] else []
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution with one module on the path, as an installer leaves it."""
    site = tmp_path / "site"
    info = site / "shouting_check-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "shouting_check.py").write_text(SHOUTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting-check\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{checks.ENTRY_POINTS}]\nshouting = shouting_check:Shouting\n")
    monkeypatch.syspath_prepend(str(site))
    checks.registered.cache_clear()
    yield site
    checks.registered.cache_clear()
    sys.modules.pop("shouting_check", None)


def checked(path: Path, *, workers: int = 1, output: Path | None = None, **policies: object) -> IngestResult:
    return validate_file(
        path, filename=path.name, policies=Policies.from_request(policies, min_examples=1), workers=workers, output=output, block_bytes=400
    )


def rows(jsonl: Callable[..., Path]) -> Path:
    loud = [chat(f"WHY IS IT {name}", f"BECAUSE OF {name} AND {name}") for name in ("RED", "FAR AWAY")]
    return jsonl(*(chat(f"question {i}", f"answer {i * 7919} of many") for i in range(20)), *loud, chat("say it", "..."))


@pytest.mark.usefixtures("installed")
def test_its_option_is_accepted_within_its_limits() -> None:
    given = Policies.from_request({"shouting": "warn", "shouting_share": 0.5, "pii": "redact"})
    assert (given.shouting, given.shouting_share, given.pii, given.toxicity) == ("warn", 0.5, "redact", "off")
    assert Policies(**given.to_dict()) == given
    with pytest.raises(InvalidRequest, match=r"policy shouting 'loudly' is not one of: off, warn, drop, review, fail"):
        Policies.from_request({"shouting": "loudly"})
    with pytest.raises(InvalidRequest, match=r"shouting_share 1\.5 is outside of 0 < t <= 1"):
        Policies.from_request({"shouting_share": 1.5})
    with pytest.raises(InvalidRequest, match=r"there are bad_rows, .*, shouting, shouting_share, encoding"):
        Policies.from_request({"whispering": "warn"})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("installed")
def test_its_findings_are_counted_and_shown(jsonl: Callable[..., Path], workers: int) -> None:
    report = checked(rows(jsonl), workers=workers, shouting="drop", shouting_share=0.5, bad_rows="drop").report
    assert report.valid and (report.rows, report.examples) == (23, 20)
    assert report.stats["shouting"] == {"flagged": 2, "seen": 23, "letters": 28 + 40}
    assert [(f["row"], f["code"], f["action"]) for f in report.flagged] == [(21, "shouts", "drop"), (22, "shouts", "drop")]
    assert [(p.code, p.label, p.message, p.fix) for p in report.problems] == [
        ("silent", "a row that says nothing", "says ...", "say more than ...")
    ]
    assert {"code": "shouting", "message": "2 rows are written in capitals and were left out"} in report.warnings
    assert report.policies["shouting"] == "drop"
    assert "shouting: 2 rows" in report.to_markdown().split("\n")
    assert "  shouting: 2 rows" in list(report_lines(asdict(report), name="rows.jsonl"))


@pytest.mark.usefixtures("installed")
def test_its_verdicts_are_those_of_every_check(jsonl: Callable[..., Path]) -> None:
    path = rows(jsonl)
    refused = checked(path, shouting="fail", shouting_share=0.5, bad_rows="drop").report
    assert refused.verdict == "not valid: 2 rows are written in capitals (rows 21, 22)"
    assert refused.problems[0].fix == "remove them, or choose the policy shouting=drop"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:21], *lines[22:]]))
    one = checked(path, shouting="fail", shouting_share=0.5, bad_rows="drop").report
    assert one.verdict == "not valid: 1 row is written in capitals (row 21)"
    path.write_text("".join(lines))
    assert checked(path, shouting="review", shouting_share=0.5, bad_rows="drop").report.review == ["shouting"]
    assert checked(path, bad_rows="drop").report.stats["shouting"] == {"flagged": 0, "seen": 0, "letters": 0}


def test_a_check_that_is_off_changes_no_dataset_id_and_one_that_is_on_does(
    jsonl: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    path = jsonl(*(chat(f"question {i}", f"answer {i * 7919} of many") for i in range(20)))
    without = checked(path).report
    request.getfixturevalue("installed")
    off, on = checked(path).report, checked(path, shouting="warn").report
    assert off.dataset_id == without.dataset_id != on.dataset_id
    assert asdict(off)["policies"] == {**without.policies, "shouting": "off", "shouting_share": 0.8}


def test_an_option_has_one_owner(installed: Path) -> None:
    module = installed / "shouting_check.py"
    module.write_text(SHOUTS.replace('"shouting_share"', '"toxicity_threshold"'))
    with pytest.raises(ValueError, match=r"check 'shouting' of .* has the name or an option \(toxicity_threshold\)"):
        checks.registered()


def test_the_table_of_policies_in_the_documentation_is_derived_from_the_options() -> None:
    table = [line.split(" | ") for line in (REPOSITORY / "docs" / "datasets.md").read_text().splitlines() if line.startswith("| `")]
    written = {cells[0].strip("|` "): (cells[1], cells[2].removesuffix(" |")) for cells in table if len(cells) == 3}
    derived = {}
    for option in policy_options().values():
        values = ", ".join(option.values) if isinstance(option.values, tuple) else f"{option.default}; a number above 0 and at most 1"
        derived[option.name] = (values, option.help)
    assert {name: written.get(name) for name in derived} == derived
