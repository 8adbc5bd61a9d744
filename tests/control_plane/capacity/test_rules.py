"""What counts as a new hardware error, and which nodes are suspect."""

from __future__ import annotations

import pytest

from control_plane.capacity.rules import COUNTS, HARDWARE_XIDS, METRICS, REMAPPED, XID, new_errors, suspects

DBE, FAILED = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "DCGM_FI_DEV_ROW_REMAP_FAILURE"


@pytest.mark.parametrize(
    ("metric", "before", "now", "says"),
    [
        pytest.param(XID, None, 79, "GPU 0: Xid 79, GPU has fallen off the bus", id="an Xid of the hardware at the first reading"),
        pytest.param(XID, 0, 48, "GPU 0: Xid 48, double-bit ECC error", id="an Xid of the hardware after none"),
        pytest.param(XID, 79, 79, None, id="the Xid that is known"),
        pytest.param(XID, 79, 0, None, id="none after a restart"),
        pytest.param(XID, 31, 79, "GPU 0: Xid 79, GPU has fallen off the bus", id="an Xid of the hardware after one of an application"),
        *(pytest.param(XID, 0, code, None, id=f"Xid {code} is not the hardware's") for code in (13, 31, 32, 43, 45, 63, 69, 94, 999)),
        pytest.param(
            DBE, None, 1, "GPU 0: uncorrectable ECC errors since the driver was loaded (1)", id="an ECC error at the first reading"
        ),
        pytest.param(DBE, 1, 1, None, id="the ECC error that is known"),
        pytest.param(DBE, 1, 3, "GPU 0: uncorrectable ECC errors since the driver was loaded (3)", id="one more ECC error"),
        pytest.param(DBE, 3, 0, None, id="the driver was loaded again"),
        pytest.param(FAILED, 0, 1, "GPU 0: a memory row could not be remapped (1)", id="a row that could not be remapped"),
        pytest.param(REMAPPED, None, 2, None, id="rows that were remapped in an earlier life"),
        pytest.param(REMAPPED, 2, 3, "GPU 0: memory rows with uncorrectable errors (3)", id="one more row"),
    ],
)
def test_an_error_counts_once_and_only_if_it_is_the_hardwares(metric: str, before: float | None, now: float, says: str | None) -> None:
    known = {} if before is None else {f"GPU 0/{metric}": before}
    assert new_errors(known, {f"GPU 0/{metric}": now}) == ([] if says is None else [says])


def test_each_gpu_counts_by_itself() -> None:
    before = {f"GPU 0/{XID}": 79.0, f"GPU 1/{XID}": 0.0}
    assert new_errors(before, {f"GPU 0/{XID}": 79.0, f"GPU 1/{XID}": 79.0}) == ["GPU 1: Xid 79, GPU has fallen off the bus"]


def test_no_xid_of_applications_is_in_the_list() -> None:
    assert not HARDWARE_XIDS.keys() & {0, 13, 31, 32, 43, 45, 63, 68, 69, 94}
    assert set(METRICS) == {XID, *COUNTS}


@pytest.mark.parametrize(
    ("failures", "found"),
    [
        pytest.param([("a", "n1"), ("b", "n1")], {"n1": ["a", "b"]}, id="two jobs on one node"),
        pytest.param([("a", "n1"), ("a", "n1")], {}, id="one job twice"),
        pytest.param([("a", "n1"), ("b", "n2")], {}, id="two jobs on two nodes"),
        pytest.param([("a", "n1"), ("a", "n2"), ("b", "n1")], {}, id="a job that fails elsewhere, too"),
        pytest.param([("a", "n1"), ("a", "n2"), ("b", "n1"), ("c", "n1")], {"n1": ["b", "c"]}, id="two others beside it"),
    ],
)
def test_two_different_jobs_that_fail_nowhere_else_make_a_node_suspect(
    failures: list[tuple[str, str]], found: dict[str, list[str]]
) -> None:
    assert suspects(failures) == found
