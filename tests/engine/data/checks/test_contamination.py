"""Contamination: the share of a row's 13-grams that a suite holds equals its plain definition, whatever the script."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import IntegrityError, InvalidRequest
from engine.data.checks.contamination.overlap import MAX_SUITES, SuiteIndex, word_classes
from engine.data.dedup.normalization import fold
from tests.engine.data.examples_of import shared_file

ALONE = range(0x0E00, 0x0F00), range(0x2E80, 0x3130), range(0x31A0, 0xA000)


def words_of(text: str) -> list[str]:
    """Runs of letters, marks and digits of the folded text; an ideograph, a kana or a Thai letter is a word."""
    words, run = [], ""
    for char in fold([text]).text(0) + " ":
        inside = unicodedata.category(char)[0] in "LMN"
        alone = inside and any(ord(char) in block for block in ALONE)
        if inside and not alone:
            run += char
            continue
        words += [run] if run else []
        words += [char] if alone else []
        run = ""
    return words


def grams_of(text: str) -> list[tuple[str, ...]]:
    words = words_of(text)
    if len(words) < 13:
        return [tuple(words)] if len(words) >= 8 else []
    return [tuple(words[i : i + 13]) for i in range(len(words) - 12)]


def plain_shares(rows: list[str], items: list[str]) -> list[float]:
    known = {gram for item in items for gram in grams_of(item)}
    each = [grams_of(row) for row in rows]
    return [sum(gram in known for gram in grams) / len(grams) if grams else 0.0 for grams in each]


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(
        f"{rng.choice(['Red', 'blue', 'GREEN', 'old', 'né'])}{rng.randrange(50)}{rng.choice(['', ',', '.', '?'])}" for _ in range(words)
    )


def test_shares_equal_those_of_python_sets() -> None:
    rng = random.Random(1)
    items = [sentence(rng, rng.randint(5, 60)) for _ in range(300)]
    rows = []
    for _ in range(300):
        item = rng.choice(items)
        rows.append(" ".join((sentence(rng, rng.randint(0, 40)), item.upper(), sentence(rng, rng.randint(0, 40)))))
    rows += [sentence(rng, n) for n in range(40)] + items[:50]
    shares, suites = SuiteIndex.build({"s": items}).shares(fold(rows))
    want = plain_shares(rows, items)
    assert shares == pytest.approx(want, abs=1e-6)
    assert (suites == np.where(np.array(want) > 0, 0, -1)).all()
    assert sum(0 < share < 1 for share in want) > 100 and sum(share == 1 for share in want) > 30 and 0.0 in want


@settings(deadline=None)
@given(
    st.lists(st.text("ab 日本ก1.é\u0301", max_size=60), max_size=5),
    st.lists(st.text("ab 日本ก1.é\u0301", max_size=60), min_size=1, max_size=5),
)
def test_shares_equal_their_definition_in_any_script(items: list[str], rows: list[str]) -> None:
    rows = [*rows, *items, "x y " + " ".join(items)]
    shares, _ = SuiteIndex.build({"s": items}).shares(fold(rows))
    assert shares == pytest.approx(plain_shares(rows, items), abs=1e-6)


def test_case_punctuation_and_spacing_do_not_hide_an_item() -> None:
    item = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    index = SuiteIndex.build({"maths": [item]})
    disguised = [
        "NATALIA  sold clips to 48 of her\nfriends in april and then she sold (half) as many -- clips, in may!",
        f"Q: {item} A: 72",
    ]
    shares, suites = index.shares(fold(disguised))
    assert shares[0] == 1.0 and 0.5 < shares[1] < 1.0
    assert suites.tolist() == [0, 0]


def test_chinese_items_are_found_although_they_have_no_spaces() -> None:
    item = "小明有三个苹果,他又买了五个,请问他现在一共有多少个苹果?"
    shares, _ = SuiteIndex.build({"zh": [item]}).shares(
        fold([f"问题:{item}答案是八个。", "今天天气很好,我们一起去公园散步,然后回家吃晚饭。"])
    )
    assert shares[0] > 0.5 and shares[1] == 0.0


def test_short_items_are_matched_whole_and_never_inside_other_text() -> None:
    eight, seven = "what is the tallest mountain in the world", "what is the capital city of france"
    index = SuiteIndex.build({"short": [eight, seven]})
    rows = ["What is the tallest mountain in the world?", f"{eight} please", f"{eight} it is said to be mount everest of course", seven]
    shares, suites = index.shares(fold(rows))
    assert shares.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert suites.tolist() == [0, -1, -1, -1]
    assert dict(index.suites) == {"short": 2} and dict(index.unmatchable) == {"short": 1}


def test_the_suite_that_holds_most_of_a_row_is_named_even_where_suites_overlap() -> None:
    rng = random.Random(2)
    shared, first, second = sentence(rng, 30), sentence(rng, 20), sentence(rng, 40)
    index = SuiteIndex.build({"none": [], "a": [shared, first], "b": [shared, second], "c": [second]})
    _, suites = index.shares(fold([shared, f"{shared} . {first}", f"{shared} . {second}", second, "unrelated"]))
    assert suites.tolist() == [1, 1, 2, 2, -1]  # the lower number where two hold as much


def test_a_saved_index_is_mapped_and_answers_alike(tmp_path: Path) -> None:
    rng = random.Random(3)
    items = [sentence(rng, 40) for _ in range(200)]
    built = SuiteIndex.build({"a": items[:100], "b": items[100:]})
    built.save(tmp_path / "index")
    loaded = SuiteIndex.load(tmp_path / "index")
    rows = fold([*items, sentence(rng, 40)])
    assert [answer.tolist() for answer in loaded.shares(rows)] == [answer.tolist() for answer in built.shares(rows)]
    assert loaded.digest == built.digest and dict(loaded.suites) == {"a": 100, "b": 100}
    assert isinstance(loaded.table.base, np.memmap) or isinstance(getattr(loaded.table.base, "base", None), np.memmap)
    built.save(tmp_path / "index")
    assert SuiteIndex.load(tmp_path / "index").digest == built.digest


def test_the_digest_is_of_the_content_not_of_the_order_of_items() -> None:
    rng = random.Random(4)
    items = [sentence(rng, 20) for _ in range(3000)]
    base = SuiteIndex.build({"a": items}).digest
    assert SuiteIndex.build({"a": iter(items[::-1])}).digest == base
    assert SuiteIndex.build({"a": items[:-1]}).digest != base
    assert SuiteIndex.build({"other": items}).digest != base
    assert SuiteIndex.build({"a": items, "b": []}).digest != base


@pytest.mark.parametrize("tear", ["missing", "short", "version", "shapes", "unfinished"])
def test_a_torn_or_foreign_index_does_not_load(tmp_path: Path, tear: str) -> None:
    SuiteIndex.build({"a": ["one two three four five six seven eight"]}).save(tmp_path)
    description = json.loads((tmp_path / "index.json").read_text())
    if tear == "missing":
        (tmp_path / "owners.npy").unlink()
    elif tear == "short":
        (tmp_path / "table.npy").write_bytes((tmp_path / "table.npy").read_bytes()[:200])
    elif tear == "version":
        (tmp_path / "index.json").write_text(json.dumps(description | {"version": 999}))
    elif tear == "shapes":
        np.save(tmp_path / "sketch.npy", np.zeros(8, np.uint8))
    else:
        (tmp_path / "index.json").unlink()
    with pytest.raises(IntegrityError, match="build it again"):
        SuiteIndex.load(tmp_path)


def test_an_index_without_items_finds_nothing_and_too_many_suites_are_refused() -> None:
    shares, suites = SuiteIndex.build({}).shares(fold(["one two three four five six seven eight nine ten", ""]))
    assert shares.tolist() == [0.0, 0.0] and suites.tolist() == [-1, -1]
    with pytest.raises(InvalidRequest, match=f"{MAX_SUITES + 1} contamination lists"):
        SuiteIndex.build({str(i): [] for i in range(MAX_SUITES + 1)})


def test_word_classes_follow_the_unicode_database() -> None:
    classes = word_classes()
    assert [int(classes[ord(c)]) for c in "aZé9_-. ж日あกक़🙂"] == [1, 1, 1, 1, 0, 0, 0, 0, 1, 2, 2, 2, 1, 1, 0]


def test_grade_school_questions_are_found_in_their_own_split_and_not_in_the_other() -> None:
    """Real text, written by the same people on the same subject."""
    questions = [json.loads(line) for line in shared_file("gsm8k_test.jsonl").read_text().splitlines()]
    index = SuiteIndex.build({"gsm8k": [row["question"] for row in questions]})
    leaked, _ = index.shares(fold([row["question"] for row in questions]))
    trained = [json.loads(line)["question"] for line in shared_file("gsm8k_train.jsonl").read_text().splitlines()]
    clean, _ = index.shares(fold(trained))
    assert leaked.mean() > 0.99
    assert (clean > 0.5).mean() < 0.01
