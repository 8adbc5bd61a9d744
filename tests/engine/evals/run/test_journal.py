"""Answers on disk: what was appended is there again, what a crash tore is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.evals.run.journal import Journal


def test_what_was_appended_is_there_for_the_next_process(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("base", "s1", {"a": "snow \u2603", "b": [1.5, 0.0]}, seconds=1.0)
        journal.append("base", "s1", {"c": {"text": "t", "refused": True, "by": "rule"}}, seconds=2.0)
        journal.append("base", "s2", {"a": "other"}, seconds=4.0)
    with Journal(tmp_path / "j") as journal:
        known = journal.answered("base", "s1")
        assert known.answers == {"a": "snow \u2603", "b": [1.5, 0.0], "c": {"text": "t", "refused": True, "by": "rule"}}
        assert known.seconds == 3.0
        assert journal.answered("adapter", "s1").answers == {}


def test_half_a_surrogate_pair_in_an_answer_is_kept(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("base", "s", {"a": "\ud83d"}, seconds=0.0)
    with Journal(tmp_path / "j") as journal:
        assert journal.answered("base", "s").answers == {"a": "\ud83d"}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_line_is_cut_off_and_the_next_one_is_whole(tmp_path: Path, cut: int) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("base", "s", {"a": "one"}, seconds=0.0)
        before = (tmp_path / "j").stat().st_size
        journal.append("base", "s", {"b": "two"}, seconds=0.0)
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[: before + cut])
    with Journal(tmp_path / "j") as journal:
        assert journal.answered("base", "s").answers == {"a": "one"}
        journal.append("base", "s", {"b": "again"}, seconds=0.0)
    with Journal(tmp_path / "j") as journal:
        assert journal.answered("base", "s").answers == {"a": "one", "b": "again"}


def test_what_follows_damage_is_not_believed(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("base", "s", {"a": "one"}, seconds=0.0)
    with (tmp_path / "j").open("ab") as file:
        file.write(b"\x00\x00\x00\n" + (tmp_path / "j").read_bytes().replace(b"one", b"two"))
    with Journal(tmp_path / "j") as journal:
        assert journal.answered("base", "s").answers == {"a": "one"}
