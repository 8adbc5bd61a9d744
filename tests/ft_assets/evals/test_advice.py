"""Advice from loss curves."""

import math

import pytest

from ft_assets.evals.advice import advise


def curve(losses: list[float], evals: list[float] | None = None, *, rate: float = 2e-4) -> list[dict[str, float]]:
    rows = [{"step": i, "loss": loss, "learning_rate": rate, "epoch": i / 10} for i, loss in enumerate(losses, 1)]
    every = len(losses) // max(1, len(evals or []))
    return rows + [{"step": (i + 1) * every, "eval_loss": loss} for i, loss in enumerate(evals or [])]


def falling(n: int, start: float, end: float, *, half: float) -> list[float]:
    """An exponential fall with half-life `half` (as a share of the run)."""
    return [end + (start - end) * 0.5 ** (i / (n * half)) for i in range(n)]


@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        pytest.param(curve(falling(60, 3.0, 0.5, half=0.08)), [], id="a good run needs no advice"),
        pytest.param(curve(falling(60, 3.0, 0.2, half=0.1), [1.0, 0.8, 0.9, 1.2]), ["overfit"], id="validation loss turned"),
        pytest.param(curve(falling(60, 3.0, 0.5, half=0.08), [1.0, 0.8, 0.79, 0.80]), [], id="a flat validation loss is no overfit"),
        pytest.param(curve([2.0, 1.5, math.nan, math.nan]), ["learning_rate_too_high"], id="the loss is no number"),
        pytest.param(curve([2.0 + 0.2 * i for i in range(30)]), ["learning_rate_too_high"], id="the loss rises"),
        pytest.param(curve([2.0, 0.8] * 20), ["learning_rate_too_high"], id="the loss swings"),
        pytest.param(curve([2.0 - 0.001 * i for i in range(40)]), ["learning_rate_too_low"], id="the loss does not move"),
        pytest.param(curve([3.0 - 0.04 * i for i in range(40)]), ["too_few_steps"], id="it ended while falling"),
        pytest.param(curve([3.0, 2.0, 1.0]), ["too_few_steps"], id="three steps have no shape"),
        pytest.param([], ["too_few_steps"], id="no curve at all"),
    ],
)
def test_advice(rows: list[dict[str, float]], codes: list[str]) -> None:
    assert [a.code for a in advise(rows)] == codes


def test_advice_names_the_numbers_to_change() -> None:
    (overfit,) = advise(curve(falling(60, 3.0, 0.2, half=0.1), [1.0, 0.8, 0.9, 1.2]))
    assert "after epoch 3.0 (0.800) and then rose to 1.200" in overfit.message
    (low,) = advise(curve([2.0 - 0.001 * i for i in range(40)]))
    assert "from 2.0e-04 to about 6.0e-04" in low.message
