"""What ``ft`` does without an API: help, usage, checks of files, and clear words when there is nothing to talk to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMANDS = (
    "up", "down", "status", "env", "login", "check", "upload", "submit", "jobs", "job", "logs", "cancel", "pause", "resume", "promote",
    "rollback", "chat", "adapters", "models", "admin", "datasets", "suites", "contamination", "estimate", "preview", "metrics",
)  # fmt: skip
Ft = Callable[..., Any]
"""Runs ``ft`` with these arguments; see the fixtures."""


def test_help_names_every_command(offline: Ft, process: Ft) -> None:
    done = process("--help")
    assert offline("--help") == done
    assert done.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.out, command


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "No such command"),
        (["submit", "no-such-file.jsonl"], "neither a local file nor the id of an uploaded one"),
        (["submit", "file-1", "--hp", "n_epochs"], "write --hp n_epochs=3"),
        (["check", "x.csv", "--map", "text"], "write text=prompt"),
        (["check", "x.csv", "--policy", "pii"], "write --policy pii=redact"),
        (["upload", "no-such-file.jsonl"], "is not a file here"),
        (["suites", "add", "quiz", "no-such-file.jsonl"], "does not exist"),
        (["admin", "tenants", "create"], "Missing argument"),
    ],
)
def test_a_usage_error_has_exit_code_2_and_says_what_to_write(offline: Ft, args: list[str], says: str) -> None:
    done = offline(*args)
    assert done.code == 2
    assert says in " ".join(done.err.split())
    assert done.out == ""


def test_without_a_key_the_message_says_how_to_get_one(offline: Ft, listener: str) -> None:
    done = offline("--url", listener, "jobs")
    assert done.code == 1
    assert "[no_api_key]" in done.err
    assert "ft login" in done.err


def test_an_api_that_does_not_answer_is_exit_code_4_and_names_the_way_out(offline: Ft, process: Ft) -> None:
    done = process("--url", "http://127.0.0.1:9", "--api-key", "x", "models", "--json")
    assert offline("--url", "http://127.0.0.1:9", "--api-key", "x", "models", "--json") == done
    assert done.code == 4
    assert "ft up" in done.err
    assert done.json["error"]["code"] == "unreachable"


@pytest.mark.parametrize("command", ["jobs", "login"])
def test_a_wrong_url_says_that_nothing_listens_there_before_it_asks_for_a_key(offline: Ft, command: str) -> None:
    done = offline("--url", "http://127.0.0.1:9", command)
    assert done.code == 4
    assert "nothing listens at http://127.0.0.1:9, given by --url" in done.err
    assert "no_api_key" not in done.err


def test_of_another_host_the_address_is_to_be_checked(offline: Ft) -> None:
    done = offline("--url", "http://127.0.0.2:9", "jobs")
    assert (done.code, "ft up" in done.err, "check the address" in done.err) == (4, False, True)


def test_a_wrong_url_names_the_stack_that_does_run_here(offline: Ft, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "endpoints.json").write_text(json.dumps({"api": "http://127.0.0.1:8123"}))
    done = offline("jobs", FT_API_URL="http://127.0.0.1:9")
    assert done.code == 4
    assert "given by FT_API_URL" in done.err and "the stack of this machine is at http://127.0.0.1:8123" in done.err


def test_an_address_without_a_scheme_is_refused_with_one_that_has_it(offline: Ft) -> None:
    done = offline("--url", "127.0.0.1:9", "jobs")
    assert done.code == 1
    assert "write http://127.0.0.1:9" in done.err


@pytest.mark.parametrize("key", [(), ("--api-key", "x")])
def test_an_address_that_is_none_is_refused(offline: Ft, key: tuple[str, ...]) -> None:
    done = offline("--url", "http://[::1", *key, "jobs", "--json")
    assert (done.code, done.json["error"]["param"]) == (1, "url")
    assert "'http://[::1' (given by --url) is not a valid address" in done.err


def test_nothing_running_is_said_and_is_no_error_to_end(offline: Ft) -> None:
    done = offline("down")
    assert done.code == 0
    assert "nothing runs in" in done.err
    status = offline("status", "--json")
    assert status.code == 4
    assert status.json["phase"] == "stopped"
    assert {s["name"] for s in status.json["services"]} >= {"postgres", "dagster", "api", "inference"}
    assert offline("env").code == 4
    assert "ft up" in offline("admin", "tenants", "list").err


def test_a_valid_file_passes_the_check(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    done = offline("check", write_chat_rows(120))
    assert done.code == 0
    assert "valid" in done.out
    assert "120 rows, 120 kept" in done.out


def test_every_bad_row_is_listed_with_its_fix(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    lines = path.read_text().splitlines()
    lines[4], lines[90] = '{"messages": [', json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    path.write_text("\n".join(lines))
    done = offline("check", path)
    assert done.code == 1
    assert "NOT VALID" in done.out
    assert "row 5 (byte " in done.out
    assert "row 91 (byte " in done.out
    assert "[invalid_role]" in done.out
    assert done.out.count("fix: ") >= 2
    report = offline("check", path, "--json")
    assert report.code == 1
    assert {e["row"] for e in report.json["errors"]} == {5, 91}


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("prompt,completion\n".encode("utf-16") * 9, ["fix: read it with --encoding utf-16", "ft check {path} --encoding utf-16"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), []),
    ],
)
def test_a_file_that_is_refused_whole_is_answered_once_with_the_command_that_reads_it(
    offline: Ft, tmp_path: Path, text: bytes, rest: list[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text)
    verdict, *further = offline("check", path).out.splitlines()
    assert "NOT VALID: rows.csv is " in verdict
    assert [line.strip() for line in further] == [line.format(path=path) for line in rest]


def test_columns_of_a_csv_can_be_mapped(offline: Ft, tmp_path: Path) -> None:
    path = tmp_path / "questions.csv"
    path.write_text("ticket,category\n" + "".join(f"question {i},label {i % 7}\n" for i in range(120)))
    assert offline("check", path).code == 1
    mapped = offline("check", path, "--map", "ticket=prompt,category=completion", "--json")
    assert mapped.code == 0
    assert mapped.json["examples"] == 120


def test_a_file_that_is_not_there_is_exit_code_2(offline: Ft, process: Ft, tmp_path: Path) -> None:
    done = process("check", tmp_path / "none.jsonl")
    assert done.code == 2
    assert offline("check", tmp_path / "none.jsonl") == done
    assert offline("check", tmp_path).code == 2


def test_policies_decide_what_is_valid(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    path.write_text(path.read_text() + '{"messages": 3}\n')
    assert offline("check", path).code == 1
    dropped = offline("check", path, "--policy", "bad_rows=drop", "--policy", "contamination_threshold=0.4", "--json")
    assert dropped.code == 0
    assert dropped.json["policies"]["contamination_threshold"] == 0.4
    refused = offline("check", path, "--policy", "bad_rows=perhaps")
    assert refused.code == 1
    assert "[invalid_policy, policies.bad_rows]" in refused.err


def test_a_check_compares_with_the_suites_that_ship(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    source = Path(__file__).parents[4] / "shared" / "data" / "gsm8k_test.jsonl"
    if not source.is_file():
        pytest.skip("no local copy of GSM8K")
    path = write_chat_rows(120)
    asked = json.loads(source.read_text().splitlines()[7])
    row = {"messages": [{"role": "user", "content": asked["question"]}, {"role": "assistant", "content": asked["answer"]}]}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    shown = offline("check", path)
    assert "contamination: 1 rows found in contamination lists (gsm8k 1); compared with gsm8k" in shown.out
    off = offline("check", path, "--policy", "contamination=off")
    assert "contamination: not checked" in off.out


def test_nine_rows_are_not_valid_to_train_on_and_may_be_a_validation_file(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    done = offline("check", write_chat_rows(9))
    assert done.code == 1
    assert "NOT VALID: 9 good examples, and a training file needs at least 10" in done.out
    assert "add 1 or more examples" in done.out and "--as-validation" in done.out
    assert offline("check", write_chat_rows(10)).code == 0
    held_out = offline("check", write_chat_rows(9), "--as-validation")
    assert (held_out.code, "too few examples to train on (9)" in held_out.out) == (0, True)


def test_a_check_without_the_platform_names_what_it_did_not_compare(
    offline: Ft, write_chat_rows: Callable[..., Path], listener: str
) -> None:
    everything = ["the limits of your tier", "contamination lists of the operator and your own"]
    path = write_chat_rows(120)
    keyless = offline("check", path, "--json", "--policy", "toxicity=warn")
    assert keyless.json["platform"]["not_compared"] == [*everything, "the platform's toxicity classifier"]
    assert "no API key for http://127.0.0.1:8000" in keyless.json["platform"]["reason"]
    assert (
        f"not compared with {', '.join(everything)}: nothing listens at http://127.0.0.1:9"
        in offline("--url", "http://127.0.0.1:9", "--api-key", "x", "check", path).err
    )
    broken = offline("--url", listener, "--api-key", "x", "check", path, "--policy", "contamination=off", "--json")
    assert (broken.code, broken.json["platform"]["not_compared"]) == (0, everything[:1])
    asked_not_to = offline("--url", listener, "--api-key", "x", "check", path, "--offline", "--json")
    assert asked_not_to.json["platform"]["reason"] == "--offline was given"


@pytest.mark.parametrize("command", ["check", "preview"])
def test_a_model_that_is_not_here_is_refused_with_the_reason_why_the_platform_was_not_asked(
    offline: Ft, write_chat_rows: Callable[..., Path], command: str
) -> None:
    done = offline(command, write_chat_rows(12), "--model", "acme/support-7b")
    assert done.code == 1
    assert "'acme/support-7b' is not in the catalogue; choose one of: demo-llama-3m" in done.err
    assert "Only the models of this directory were looked at: no API key for http://127.0.0.1:8000" in done.err


def test_the_report_can_be_a_page_of_its_own(offline: Ft, write_chat_rows: Callable[..., Path], tmp_path: Path) -> None:
    path = write_chat_rows(120)
    path.write_text(path.read_text() + '{"messages": [{"role": "<b>robot</b>", "content": "x"}]}\n')
    done = offline("check", path, "--html", tmp_path / "report.html")
    assert done.code == 1
    page = (tmp_path / "report.html").read_text()
    assert "invalid_role" in page
    assert "<svg" in page
    assert "<b>robot" not in page
    assert "src=" not in page


def test_a_preview_of_a_file_here_needs_no_platform(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    done = offline("preview", write_chat_rows(12), "--model", "demo-llama-3m", "-n", "2")
    assert done.code == 0, done.err
    assert "What is 0 plus 0?" in done.out
    assert "What is 1 plus 1?" in done.out
    assert "What is 2 plus 2?" not in done.out
    assert "shown with the demo-llama-3m of this directory, not with the platform's tokenizer and template: no API key for" in done.err
    shown = offline("preview", write_chat_rows(12), "-n", "1", "--offline", "--json")
    assert len(shown.json) == 1
    assert shown.err.endswith("template: --offline was given\n")


def test_a_preview_names_the_rows_that_it_leaves_out(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    rows = write_chat_rows(12)
    assert "not shown" not in offline("preview", rows).err
    with rows.open("a") as stream:
        stream.write('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}\n')
    done = offline("preview", rows)
    assert done.code == 0
    assert f"1 row with problems is not shown; `ft check {rows}` lists every problem" in done.err


def test_a_hub_that_is_not_set_up_is_named(offline: Ft) -> None:
    for command in ("check", "preview"):
        done = offline(command, "hf://acme/tickets@" + "a" * 40)
        assert done.code == 2
        assert "[hub_disabled]" in done.err
    assert "[hub_revision_not_pinned]" in offline("check", "hf://acme/tickets").err


def test_the_demos_data_is_written_once_and_names_the_next_command(offline: Ft, tmp_path: Path) -> None:
    first = offline("demo-data", "data")
    assert first.code == 0
    assert first.out.split() == ["data/tickets.jsonl", "data/holdout.jsonl"]
    assert "1,500 rows" in first.err and "240 rows" in first.err
    next_command = first.err.partition("next: ft ")[2].split()
    assert next_command == ["check", "data/tickets.jsonl", "--model", "demo-llama-3m"]
    assert offline(*next_command).code == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert written["tickets.jsonl"].count(b"\n") == 1500

    again = offline("demo-data", "data", "--json")
    assert again.code == 0, "the same bytes may be written again"
    assert again.json["validation_file"] == "data/holdout.jsonl"
    (tmp_path / "data/holdout.jsonl").write_text("mine\n")
    refused = offline("demo-data", "data")
    assert refused.code == 1
    assert "data/holdout.jsonl exists with other content" in refused.err
    assert (tmp_path / "data/holdout.jsonl").read_text() == "mine\n"
