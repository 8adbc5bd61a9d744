"""The pictures of the console are small, of pages that exist, and each is shown once in ``docs/console.md``."""

from __future__ import annotations

import re

from tests.support.console.console_pictures import FOLDER, MAX_BYTES, PAGE, shots

TAKEN = {path.stem: path.stat().st_size for path in FOLDER.glob("console_*")}


def test_every_picture_is_shown_once_and_of_a_page_that_exists() -> None:
    shown = re.findall(r"\(pictures/(console_\S+)\.webp\)", PAGE.read_text())
    assert len(shown) > 20
    assert sorted(shown) == sorted(TAKEN)
    assert TAKEN.keys() - {shot.name for shot in shots()} == set()


def test_pictures_are_small() -> None:
    assert {name: size for name, size in TAKEN.items() if size > MAX_BYTES} == {}
