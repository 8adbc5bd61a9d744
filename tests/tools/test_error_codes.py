"""docs/errors.yaml is the one source of docs/errors.md, and each code has one complete entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import headings
from tools import error_codes


def test_the_page_of_error_codes_is_up_to_date() -> None:
    assert error_codes.PAGE.read_text(encoding="utf-8") == error_codes.page(), "make pages writes it"


def test_every_code_has_an_anchor_on_the_page() -> None:
    codes = error_codes.load()
    assert len(codes) > 500
    assert {name.lower() for name in codes} <= headings(error_codes.PAGE)


def test_no_entry_of_a_code_is_an_essay() -> None:
    long = {code.name: words for code in error_codes.load().values() if (words := len(f"{code.means} {code.next}".split())) > 55}
    assert long == {}, "link to the guide that explains it"


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ("seed: {status: 400, fault: user, next: Change it.}", "has means"),
        ("seed: {means: Wrong., remedy: Change it.}", "has means"),
        ("seed: {means: Wrong., fault: nobody}", "has means"),
        ("seed: {means: Wrong.}\n    limit, seed: {means: Wrong.}", "seed has two entries"),
    ],
)
def test_an_incomplete_or_second_entry_is_refused(entries: str, refused: str, tmp_path: Path) -> None:
    (tmp_path / "errors.yaml").write_text(f"intro: ''\nsections:\n- title: All\n  codes:\n    {entries}\n")
    with pytest.raises(ValueError, match=refused):
        error_codes.load(tmp_path / "errors.yaml")
