"""The picture of a lineage: every box is drawn, linked, readable without color, and harmless."""

from __future__ import annotations

import re

import pytest

from control_plane.console.documents.lineage_picture import Box, cut, folded, tall, wide

LAYERS = [
    [Box(kind="Training file", name="a.jsonl", href="/files/a"), Box(kind="Validation file", name="b.jsonl", detail="deleted", mark="off")],
    [Box(kind="Dataset", name="support v1", href="/datasets/1"), Box(kind="Base model", name="tiny", href="/base", joins=False)],
    [Box(kind="Job", name="sft job", href="/jobs/1")],
    [Box(kind="Evaluation", name="Did not pass", href="/evaluation", mark="failed")],
]
DRAWN = {"wide": wide(LAYERS, title="Lineage"), "tall": tall(LAYERS, title="Lineage")}


@pytest.mark.parametrize("name", DRAWN)
def test_every_box_is_drawn_and_linked_if_it_has_a_page(name: str) -> None:
    drawn = DRAWN[name]
    assert re.findall(r'<text class="name"[^>]*>([^<]+)', drawn) == ["a.jsonl", "b.jsonl", "support v1", "tiny", "sft job", "Did not pass"]
    assert re.findall(r'<a class="box[^"]*" href="([^"]+)"', drawn) == ["/files/a", "/datasets/1", "/base", "/jobs/1", "/evaluation"]
    assert drawn.count('class="edge"') == 2 + 2 + 1, "files lead to the dataset alone, dataset and base to the job"


@pytest.mark.parametrize("name", DRAWN)
def test_boxes_lie_inside_the_picture_and_apart(name: str) -> None:
    width, height = (float(size) for size in re.findall(r'viewBox="-1 -1 (\S+) (\S+)"', DRAWN[name])[0])
    boxes = [tuple(map(float, one)) for one in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)" rx="8"/>', DRAWN[name])]
    assert len(boxes) == 6
    for at, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 <= y
        assert (x + w <= width, y + h <= height) == (True, True)
        for left, top, _, _ in boxes[at + 1 :]:
            assert left >= x + w or top >= y + h


def test_states_are_shown_without_color() -> None:
    drawn = DRAWN["wide"]
    assert drawn.count('class="inner"') == 1, "what failed has a double frame"
    assert '<g class="box off">' in drawn
    assert "<title>Validation file, b.jsonl, deleted</title>" in drawn


def test_names_are_text() -> None:
    drawn = wide([[Box(kind="File", name="<script>alert(1)</script>", href='/x" onclick="alert(1)')]], title='"><script>')
    assert "<script" not in drawn
    assert 'onclick="' not in drawn


@pytest.mark.parametrize(
    ("text", "room", "shown"), [("short", 9, "short"), ("support-tickets.jsonl", 12, "support…sonl"), ("abc", 3, "abc")]
)
def test_a_long_name_keeps_both_ends(text: str, room: float, shown: str) -> None:
    assert cut(text, room) == shown
    assert len(cut(text, room)) <= room


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("120 rows", ("120 rows",)),
        ("trained, did not pass its gate", ("trained, did not", "pass its gate")),
        ("exactly-18-letters-and-more", ("exactly-18-…d-more",)),
        ("production since 21 November 2026 at noon", ("production since", "21 November…t noon")),
    ],
)
def test_a_long_detail_has_two_lines(text: str, shown: tuple[str, ...]) -> None:
    assert folded(text, 18.5) == shown


def test_both_lines_of_a_detail_are_drawn_inside_their_box() -> None:
    drawn = wide([[Box(kind="Job", name="sft job", detail="trained, did not pass its gate")]], title="Lineage")
    y, height = (float(one) for one in re.findall(r'<rect x="0" y="(\S+)" width="144" height="(\S+)" rx="8"/>', drawn)[0])
    lines = re.findall(r'<text class="(\w+)" x="11" y="(\S+)">([^<]+)', drawn)
    assert [(kind, text) for kind, _, text in lines] == [
        ("kind", "Job"), ("name", "sft job"), ("detail", "trained, did not"), ("detail", "pass its gate")
    ]  # fmt: skip
    heights = [float(one) for _, one, _ in lines]
    assert heights == sorted(heights)
    assert y + 12 <= heights[0] <= heights[-1] <= y + height - 6
