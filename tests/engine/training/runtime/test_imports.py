"""A run imports what it uses, and what it does not use stays hidden from libraries that would import it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.training.attempts import SPEC, job


@pytest.mark.slow
def test_an_8_bit_optimizer_finds_its_library_without_4_bit_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    optimization = replace(SPEC.optimization, optimizer="adamw_8bit", max_steps=3)
    with job(tmp_path, adapter="full", lora=None, optimization=optimization) as trained:
        assert trained.train(fresh=True) == 0, trained.log()
        assert len(trained.steps()) == 3
