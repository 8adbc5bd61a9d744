"""Answers of the client: fields as attributes, and lists as pandas frames."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from ft_client import Record
from ft_client.record import parse
from tests.ft_client.scripted import client, ok

JOB = parse(
    '{"object": "fine_tuning.job", "status": "running", "error": {"code": "e"}, "steps": [{"n": 1, "loss": {"train": 2.5}}, {"n": 2}]}'
)


def test_a_field_is_an_attribute_at_every_depth() -> None:
    assert JOB.status == JOB["status"] == "running"
    assert JOB.error.code == "e"
    assert JOB.steps[0].loss.train == 2.5
    assert {"status", "steps"} <= set(dir(JOB)), "notebooks complete the names"


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"fine_tuning\.job has no field 'stattus'; it has object, status, error, steps"):
        JOB.stattus  # noqa: B018
    assert not hasattr(JOB, "stattus")


def test_a_record_is_a_dictionary_to_whoever_wants_one() -> None:
    assert json.loads(json.dumps(JOB)) == JOB
    for same in (copy.deepcopy(JOB), pickle.loads(pickle.dumps(JOB))):
        assert same == JOB
        assert isinstance(same.error, Record)


def test_a_list_is_a_frame_with_a_column_for_each_nested_field() -> None:
    frame = JOB.frame("steps")
    assert list(frame.columns) == ["n", "loss.train"]
    assert list(frame["n"]) == [1, 2]
    assert frame["loss.train"].isna().tolist() == [False, True]
    assert Record(data=[]).frame().empty


def test_a_frame_of_a_list_has_the_objects_of_all_pages() -> None:
    ft, seen = client(ok(data=[{"id": "a"}, {"id": "b"}], has_more=True), ok(data=[{"id": "c"}], has_more=False))
    assert list(ft.jobs.list().frame()["id"]) == ["a", "b", "c"]
    assert seen[1].url.params["after"] == "b"
