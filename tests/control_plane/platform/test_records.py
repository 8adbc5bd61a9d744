"""Rows become frozen dataclasses where they leave the database."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import NoResultFound

from control_plane.platform import records


class Stage(StrEnum):
    DRAFT = "draft"
    LIVE = "live"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    id: str
    stage: Stage
    left_stage: Stage | None
    tags: tuple[str, ...]
    metrics: Mapping[str, Any]
    created_at: datetime
    num_uses: int = 0


things = sa.Table(
    "things", sa.MetaData(),
    sa.Column("id", sa.Text, primary_key=True), sa.Column("stage", sa.Text), sa.Column("left_stage", sa.Text), sa.Column("tags", sa.JSON),
    sa.Column("metrics", sa.JSON), sa.Column("secret", sa.Text), sa.Column("created_at", sa.DateTime),
)  # fmt: skip
AT = datetime(2026, 11, 25, tzinfo=UTC).replace(tzinfo=None)


@pytest.fixture
def conn():
    engine = sa.create_engine("sqlite://")
    with engine.begin() as conn:
        things.metadata.create_all(conn)
        row = {"left_stage": None, "tags": ["a", "b"], "metrics": {"loss": 1.5}, "secret": "s", "created_at": AT}
        conn.execute(things.insert(), [{"id": "t1", "stage": "live", **row}, {"id": "t2", "stage": "draft", **row, "left_stage": "live"}])
        yield conn
    engine.dispose()


def test_a_record_has_the_columns_of_its_fields_and_the_types_it_states(conn):
    query = sa.select(*records.columns(things, Thing)).where(things.c.id == "t2")
    found = records.one(conn, query, Thing)
    assert found == Thing(
        id="t2", stage=Stage.DRAFT, left_stage=Stage.LIVE, tags=("a", "b"), metrics={"loss": 1.5}, created_at=AT
    )  # fmt: skip
    assert isinstance(found.stage, Stage) and isinstance(found.left_stage, Stage)
    with pytest.raises(FrozenInstanceError):
        found.stage = Stage.LIVE  # type: ignore[misc]


def test_a_json_column_is_the_dataclass_of_its_field(conn):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Metrics:
        loss: float

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Measured:
        id: str
        metrics: Metrics | None
        earlier: tuple[Metrics, ...]

    def measured(metrics: Mapping[str, Any] | None) -> Measured:
        return records.record(Measured, {"id": "t1", "metrics": metrics, "earlier": [{"loss": 3.0}, {"loss": 2.0}]})

    assert measured({"loss": 1.5}) == Measured(id="t1", metrics=Metrics(loss=1.5), earlier=(Metrics(loss=3.0), Metrics(loss=2.0)))
    assert measured(None).metrics is None
    with pytest.raises(TypeError, match="accuracy"):
        measured({"loss": 1.5, "accuracy": 0.5})


def test_a_computed_column_fills_the_field_of_its_label(conn):
    query = sa.select(*records.columns(things, Thing), sa.literal(7).label("num_uses")).order_by(things.c.id)
    assert [(t.id, t.num_uses, t.left_stage) for t in records.many(conn, query, Thing)] == [("t1", 7, None), ("t2", 7, Stage.LIVE)]


def test_a_query_that_selects_more_or_less_than_the_fields_is_an_error(conn):
    with pytest.raises(TypeError, match="secret"):
        records.one(conn, sa.select(things).where(things.c.id == "t1"), Thing)
    with pytest.raises(TypeError, match="created_at"):
        records.one(conn, sa.select(things.c.id, things.c.stage, things.c.left_stage, things.c.tags, things.c.metrics).limit(1), Thing)


def test_no_row_is_none_or_an_error_as_the_caller_chooses(conn):
    query = sa.select(*records.columns(things, Thing)).where(things.c.id == "t3")
    assert records.one_or_none(conn, query, Thing) is None
    with pytest.raises(NoResultFound):
        records.one(conn, query, Thing)
    with pytest.raises(LookupError, match="no thing t3"):
        records.one_or_raise(conn, query, Thing, LookupError("no thing t3"))
    there = sa.select(*records.columns(things, Thing)).where(things.c.id == "t2")
    assert records.one_or_raise(conn, there, Thing, LookupError()) == records.one(conn, there, Thing)
