"""Shards of full parameters are read without running what their pickles name."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, state_dict_loader, state_dict_saver

from engine.training.runtime.parallel import reading_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"weight": torch.arange(6.0).reshape(2, 3), "groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None}]}


class _Runs:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def _saved(directory: Path, state: Any) -> Path:
    state_dict_saver.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def _loaded(directory: Path) -> Any:
    found: dict[str, Any] = {"weight": torch.zeros(2, 3), "groups": [{"lr": 0.0, "betas": (0.0, 0.0), "foreach": True}]}
    reader, planner = reading_shards.distributed(directory)
    state_dict_loader.load(found, storage_reader=reader, planner=planner, no_dist=True)
    return found


def test_tensors_and_settings_come_back(tmp_path: Path) -> None:
    found = _loaded(_saved(tmp_path / "shards", STATE))
    assert torch.equal(found["weight"], STATE["weight"])  # type: ignore[arg-type]
    assert found["groups"] == STATE["groups"]


def test_metadata_that_names_code_is_refused_before_it_runs(tmp_path: Path) -> None:
    directory, touched = _saved(tmp_path / "shards", STATE), tmp_path / "touched"
    (directory / ".metadata").write_bytes(pickle.dumps(_Runs(touched)))
    with pytest.raises(CheckpointException, match=r"names pathlib.* which it has no use for"):
        _loaded(directory)
    assert not touched.exists()


def test_a_setting_that_names_code_is_refused_before_it_runs(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    directory = _saved(tmp_path / "shards", {**STATE, "groups": [{**STATE["groups"][0], "lr": _Runs(touched)}]})  # type: ignore[dict-item]
    with pytest.raises(CheckpointException, match="weights_only"):
        _loaded(directory)
    assert not touched.exists()


def test_a_file_of_deepspeed_that_names_code_is_refused_before_it_runs(tmp_path: Path) -> None:
    touched, file = tmp_path / "touched", io.BytesIO()
    torch.save({"module": _Runs(touched)}, file, _use_new_zipfile_serialization=False)
    (tmp_path / "zero.pt").write_bytes(file.getvalue())
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        reading_shards.of_deepspeed(str(tmp_path / "zero.pt"))
    assert not touched.exists()
