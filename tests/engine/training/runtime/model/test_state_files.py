"""What a checkpoint keeps of optimizers and schedules: every value with its kind, in files that run no code."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.runtime.model import optimizers, state_files  # noqa: E402
from engine.training.runtime.parallel.replicated import copied, set_rates  # noqa: E402
from tests.engine.training.attempts import SPEC  # noqa: E402

KINDS = ["adamw_torch", "adamw_8bit", "adafactor"]


class Trained:
    """A model of two matrices and a bias with an optimizer, whose gradients are the same each time."""

    def __init__(self, kind: str) -> None:
        opt = replace(SPEC.optimization, optimizer=kind, weight_decay=0.1)
        rng = torch.Generator().manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 96, bias=False))
        for p in self.model.parameters():
            p.data = torch.randn(p.shape, generator=rng)
        self.model[1].weight.data = self.model[1].weight.data.t().contiguous().t()  # its state is not contiguous either
        self.optimizer: Any = optimizers.make_optimizer(self.model, opt)
        self.schedule = optimizers.make_schedule(self.optimizer, opt, total_steps=20)
        self._rng = torch.Generator()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self._rng.manual_seed(step)
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape, generator=self._rng)
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        held = optimizers.state_by_name(self.optimizer, self.model, lambda t: t.detach().to("cpu", copy=True))
        return {"state": held, "groups": optimizers.settings(self.optimizer)}

    def load(self, directory: Path) -> None:
        saved = optimizers.load_settings(self.optimizer, directory)
        optimizers.restore_state(self.optimizer, self.model, saved, lambda tensor, p: tensor.to(p.device))
        self.schedule.load_state_dict(state_files.read_schedule(directory)["schedule"])
        set_rates(self.optimizer, self.schedule)


@pytest.mark.parametrize("form", ["safetensors", "of earlier releases"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_from_its_files_as_if_it_had_not_stopped(kind: str, form: str, tmp_path: Path) -> None:
    undisturbed, stopped, resumed = Trained(kind), Trained(kind), Trained(kind)
    undisturbed.steps(0, 9)
    stopped.steps(0, 5)
    schedule = {"schedule": copied(stopped.schedule.state_dict())}
    if form == "safetensors":
        state_files.write_optimizer(tmp_path, stopped.state())
        state_files.write_schedule(tmp_path, schedule)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["optimizer.safetensors", "schedule.json"]
        assert not any(zipfile.is_zipfile(p) for p in tmp_path.iterdir()), "torch.save's archives hold pickles"
    else:
        torch.save(stopped.state(), tmp_path / "optimizer.pt")
        torch.save(schedule, tmp_path / "schedule.pt")
    resumed.model.load_state_dict(stopped.model.state_dict())
    resumed.load(tmp_path)
    resumed.steps(5, 9)
    for ours, theirs in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.schedule.get_last_lr() == undisturbed.schedule.get_last_lr()


def test_values_keep_their_kinds_and_every_bit(tmp_path: Path) -> None:
    state = {
        "numbers": (0.1, 1e-323, -0.0, math.inf, 2**70, True, None), 3: ["a", {}, [], ()], "dict": {"tensor": "a name that marks"},
        "tensors": {
            "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "int8": torch.tensor([[255]], dtype=torch.uint8),
            "step": torch.tensor(7.0), "empty": torch.zeros(0, 3), "turned": torch.arange(6.0).reshape(2, 3).t(),
        },
    }  # fmt: skip
    state_files.write_optimizer(tmp_path, state)
    found = state_files.read_optimizer(tmp_path)
    tensors, expected = found.pop("tensors"), state.pop("tensors")
    assert repr(found) == repr(state)
    assert list(tensors) == list(expected)
    assert all(tensors[k].dtype == v.dtype and tensors[k].shape == v.shape and torch.equal(tensors[k], v) for k, v in expected.items())
    first = (tmp_path / state_files.OPTIMIZER).read_bytes()
    state_files.write_optimizer(tmp_path, {**state, "tensors": expected})
    assert (tmp_path / state_files.OPTIMIZER).read_bytes() == first, "the same state has the same bytes"


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.float32])
def test_what_has_no_such_form_is_refused_before_a_file_exists(value: Any, tmp_path: Path) -> None:
    for write in (state_files.write_optimizer, state_files.write_schedule):
        with pytest.raises(TypeError, match=type(value).__name__):
            write(tmp_path, {"a": [value]})
    with pytest.raises(TypeError, match="Tensor"):
        state_files.write_schedule(tmp_path, {"rate": torch.tensor(1.0)})
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_is_readable_text(tmp_path: Path) -> None:
    made = Trained("adamw_torch")
    made.steps(0, 2)
    state_files.write_schedule(tmp_path, {"schedule": made.schedule.state_dict()})
    assert ["last_epoch", 2] in json.loads((tmp_path / state_files.SCHEDULE).read_text())["dict"][0][1]["dict"]
