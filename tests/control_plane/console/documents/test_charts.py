"""Charts and words of the console: names are text and never markup, averages keep the sum, and signs are shown."""

from __future__ import annotations

import re

import pytest

from control_plane.console import jinja_environment
from control_plane.console.documents import charts

HOSTILE = "<script>alert('x')</script>"


def test_names_in_charts_are_text_wherever_they_stand() -> None:
    bars = charts.columns([(HOSTILE, 2.0)], title=HOSTILE, form="{:.1f} " + HOSTILE)
    lines = charts.over_time([[(0.0, 1.0), (1.0, 2.0)]], title=HOSTILE, ends=(HOSTILE, HOSTILE, HOSTILE), limit=3.0)
    for drawn, times in ((bars, 4), (lines, 4)):
        assert "<script" not in drawn
        assert drawn.count("&lt;script&gt;") == times


def test_neighbors_of_a_long_line_are_averaged_and_none_is_left_out() -> None:
    points = [(float(n), float(n % 7)) for n in range(1000)]
    found = charts.thinned(points, 250)
    assert len(found) == 250
    assert sum(y for _, y in found) * 4 == pytest.approx(sum(y for _, y in points))
    assert found[0] == (1.5, 1.5)
    assert charts.thinned(points[:250], 250) == points[:250]


@pytest.mark.parametrize(
    ("low", "high", "middle", "side"),
    [(0.1, 0.3, 0.2, "good"), (-0.1, 0.5, 0.2, "even"), (-0.5, 0.1, -0.2, "even"), (-0.3, -0.1, -0.2, "bad"), (0.0, 0.4, 0.2, "even")],
)
def test_an_interval_is_good_or_bad_only_if_all_of_it_is(low: float, high: float, middle: float, side: str) -> None:
    drawn = charts.interval_bar(low, high, middle, reach=1.0)
    assert re.search(r'class="bar (\w+)"', drawn)[1] == side  # type: ignore[index]


@pytest.mark.parametrize(
    ("micros", "expected"), [(0, "$0.00"), (-1_234_560_000, "-$1,234.56"), (1_500, "$0.0015"), (10_000, "$0.01"), (-2_500, "-$0.0025")]
)
def test_amounts_show_their_sign_and_fractions_of_cents(micros: int, expected: str) -> None:
    assert jinja_environment._money(micros) == expected


def test_code_in_prose_is_marked_and_everything_is_escaped() -> None:
    assert jinja_environment._prose("Send `a < b` & <b>") == "Send <code>a &lt; b</code> &amp; &lt;b&gt;"


@pytest.mark.parametrize(("last", "shown"), [(379.0, ["0", "190", "step 379"]), (1.0, ["0", "", "step 1"])])
def test_steps_below_a_chart_are_whole_numbers(last: float, shown: list[str]) -> None:
    line = charts.Line(points=((0.0, 2.0), (last, 1.0)), metric="loss")
    drawn = charts.Curve(title="Loss", lines=(line,)).svg()
    assert re.findall(r'<text class="x"[^>]*>([^<]*)</text>', drawn) == shown
