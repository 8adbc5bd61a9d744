"""Which capability suites there are and whether their rows lie on disk: told without lm-eval."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InvalidRequest
from engine.evals.suites import task_files

LOCAL = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: ["yes", "no"]
metadata: {{version: 3}}
"""


def write_suite(directory: Path, name: str = "ours", *, num_rows: int = 4) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.yaml").write_text(LOCAL.format(name=name))
    rows = [{"question": f"Is {n} even?", "answer": n % 2} for n in range(num_rows)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def listed(task_dirs: list[Path], data_dir: Path | None = None) -> dict[str, task_files.Listed]:
    return {suite.name: suite for suite in task_files.list_suites(task_dirs, data_dir)}


def test_the_stand_ins_are_ready_and_the_large_ones_say_which_files_they_want() -> None:
    found = listed([])
    assert {name for name, suite in found.items() if suite.ready} == {"standin_choices", "standin_copy"}
    assert {name: suite.num_fewshot for name, suite in found.items() if not suite.ready} == {
        "mmlu": 5,
        "hellaswag": 10,
        "arc_challenge": 25,
        "gsm8k": 5,
        "truthfulqa_mc1": 0,
        "truthfulqa_mc2": 0,
    }
    assert found["standin_choices"].num_items == found["standin_copy"].num_items == 200
    assert "mmlu/dev.jsonl, mmlu/test.jsonl" in (found["mmlu"].reason or "")
    assert "FT_EVAL_DATA" in (found["mmlu"].reason or "")


def test_rows_that_the_operator_put_there_make_a_suite_ready(tmp_path: Path) -> None:
    place = tmp_path / "arc_challenge"
    place.mkdir()
    (place / "train.jsonl").write_text("{}\n")
    assert str(place / "test.jsonl") in (listed([], tmp_path)["arc_challenge"].reason or "")
    pq.write_table(pa.table({"question": ["a", "b", "c"]}), place / "test.parquet")
    found = listed([], tmp_path)["arc_challenge"]
    assert (found.ready, found.reason, found.num_items) == (True, None, 3)


def test_an_operators_directory_adds_suites_and_a_later_name_counts(tmp_path: Path) -> None:
    first, second = write_suite(tmp_path / "a"), write_suite(tmp_path / "b", num_rows=6)
    assert listed([first])["ours"] == task_files.Listed(
        name="ours", version="3", num_fewshot=0, num_items=4, output="multiple_choice", shipped=False, ready=True, reason=None
    )
    assert listed([first, second])["ours"].num_items == 6


def test_a_group_is_listed_and_its_members_are_not(tmp_path: Path) -> None:
    directory = write_suite(tmp_path / "a")
    (directory / "group.yaml").write_text("group: both\ntask: [ours, standin_choices]\n")
    found = listed([directory])
    assert {"ours", "standin_choices"}.isdisjoint(found)
    assert (found["both"].num_items, found["both"].ready) == (204, True)


FILES = "task: x\ndataset_path: json\ndataset_kwargs: {data_files: {test: %s}}\n"


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        pytest.param("task: x\ndataset_path: cais/mmlu\n", "evaluations fetch nothing", id="data of a hub"),
        pytest.param(FILES % "gone.jsonl", "gone.jsonl does not exist", id="no file"),
        pytest.param(FILES % "'https://a/b'", "one local file", id="an address"),
        pytest.param("task: [x\n", "cannot be read", id="no YAML"),
        pytest.param("include: x.yaml\ntask: x\n", "includes itself", id="a circle"),
    ],
)  # fmt: skip
def test_a_definition_that_cannot_be_asked_says_why(tmp_path: Path, definition: str, reason: str) -> None:
    (tmp_path / "x.yaml").write_text(definition)
    found = listed([tmp_path])["x"]
    assert not found.ready
    assert reason in (found.reason or "")
    with pytest.raises(InvalidRequest, match="is not ready") as refused:
        task_files.check_suites(["x"], [tmp_path], None)
    assert (refused.value.code, refused.value.param) == ("capability_suite_not_ready", "eval_config.capability")


def test_an_unknown_suite_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown capability suite 'mmul'; known: arc_challenge, gsm8k, hellaswag, mmlu") as refused:
        task_files.check_suites(["standin_copy", "mmul"], [], None)
    assert refused.value.code == "capability_suite_unknown"


def test_a_list_of_suites_imports_neither_the_harness_nor_torch() -> None:
    code = (
        "import sys; from engine.evals.suites import task_files; task_files.list_suites([], None);"
        "print(sorted({'lm_eval', 'torch', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_definition_that_an_operator_edits_counts_at_once_and_wins_over_what_it_includes(tmp_path: Path) -> None:
    directory = write_suite(tmp_path)
    (directory / "variant.yaml").write_text("include: ours.yaml\ntask: variant\nmetadata: {version: 4}\n")
    assert {name: listed([directory])[name].version for name in ("ours", "variant")} == {"ours": "3", "variant": "4"}
    assert listed([directory])["variant"].num_items == 4
    (directory / "ours.yaml").write_text(LOCAL.format(name="ours").replace("version: 3", "version: 10"))
    assert listed([directory])["ours"].version == "10"


def test_an_operators_rows_are_checked_and_put_where_their_suite_reads_them(tmp_path: Path) -> None:
    data, published = tmp_path / "data", tmp_path / "validation-00000-of-00001.parquet"
    row = {"question": "q", "mc1_targets": {"choices": ["a", "b"], "labels": [1, 0]}, "mc2_targets": {"choices": ["a"], "labels": [1]}}
    pq.write_table(pa.Table.from_pylist([row] * 3), published)

    def add(name: str, split: str, source: Path, data_dir: Path | None = data) -> tuple[Path, int]:
        return task_files.add_suite_rows(name, split, source, task_dirs=[], data_dir=data_dir)

    assert add("truthfulqa_mc1", "validation", published) == (data / "truthfulqa/validation.parquet", 3)
    found = listed([], data)
    assert [(found[f"truthfulqa_mc{n}"].ready, found[f"truthfulqa_mc{n}"].num_items) for n in (1, 2)] == [(True, 3)] * 2
    lines = tmp_path / "test.jsonl"
    lines.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    assert add("gsm8k", "test", lines) == (data / "gsm8k/test.jsonl", 1)
    refused = {
        ("gsm8k", "test", published): "no column answer",
        ("gsm8k", "dev", lines): "it has train, test",
        ("gsm9k", "test", lines): "unknown capability suite",
        ("standin_copy", "test", lines): "has its own rows",
        ("gsm8k", "test", tmp_path / "test.csv"): "neither .parquet nor .jsonl",
    }
    for given, why in refused.items():
        with pytest.raises(InvalidRequest, match=why):
            add(*given)
    with pytest.raises(InvalidRequest, match="FT_EVAL_DATA"):
        add("gsm8k", "test", lines, data_dir=None)
