"""Types of the client's results against the API's description."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ft_client.record import parse
from ft_client.types import Job, SigningKeySet
from tools.client_types import DOCUMENT, OUT, module


def test_the_types_are_those_of_the_description() -> None:
    """``python -m tools.client_types`` writes them."""
    written = module(json.loads(DOCUMENT.read_text()))
    ruff = [str(Path(sys.executable).parent / "ruff"), "format", "--stdin-filename", str(OUT), "-"]
    assert subprocess.run(ruff, input=written, capture_output=True, text=True, check=True).stdout == OUT.read_text()


def test_fields_have_the_types_of_their_schemas() -> None:
    fields = Job.__annotations__
    assert (fields["id"], fields["fine_tuned_model"], fields["object"]) == ("str", "str | None", "Literal['fine_tuning.job']")
    assert "keys" not in SigningKeySet.__annotations__, "a method of every record: the field is read with brackets"


def test_a_record_has_the_fields_of_its_type() -> None:
    job: Job = parse('{"id": "ftjob-1", "hyperparameters": {"n_epochs": 3}}')
    assert (job.id, job["id"]) == ("ftjob-1", "ftjob-1")
