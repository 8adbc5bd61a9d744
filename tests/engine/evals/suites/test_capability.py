"""Capability suites: lm-eval's own prompts and numbers, asked our way."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import InvalidRequest
from engine.evals.suites import harness_tasks
from engine.evals.suites.harness_tasks import CapabilitySuite
from engine.evals.suites.model_requests import Answer, Generate, Likelihood

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
BASE = Path(__file__).parents[4] / "examples" / "demo" / "base_model"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stand_ins() -> dict[str, CapabilitySuite]:
    return {suite.suite.id: suite for suite in harness_tasks.load(["standin_choices", "standin_copy"], limit=50)}


def rows(name: str) -> list[dict[str, Any]]:
    path = Path(harness_tasks.files.SHIPPED) / "standin" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_questions_become_a_likelihood_for_each_choice(stand_ins: dict[str, CapabilitySuite]) -> None:
    suite = stand_ins["capability/standin_choices"].suite
    docs = rows("standin_choices")
    assert (suite.kind, suite.num_items, suite.version) == ("capability", 50, "1.0 (lm-eval 0.4.13)")
    chosen = [docs[at] for at in range(0, 200, 4)]
    wanted = [(doc["context"], choice) for doc in chosen for choice in doc["choices"]]
    assert [(r.context, r.continuation) for r in suite.requests if isinstance(r, Likelihood)] == wanted
    assert suite.requests[4].id == "standin_choices/4/0"
    assert len({r.id for r in suite.requests}) == len(suite.requests)


def test_a_text_to_be_written_becomes_one_request_with_its_end(stand_ins: dict[str, CapabilitySuite]) -> None:
    doc = rows("standin_copy")[4]
    request = stand_ins["capability/standin_copy"].suite.requests[1]
    assert request == Generate(id="standin_copy/4/0", text=doc["context"], max_new_tokens=24, stops=("<|im_end|>",))


def test_the_likeliest_choice_is_the_answer(stand_ins: dict[str, CapabilitySuite]) -> None:
    loaded = stand_ins["capability/standin_choices"]
    docs = rows("standin_choices")

    def answers(of: Sequence[int]) -> dict[str, Answer]:
        right = {f"standin_choices/{at}/{docs[at]['answer']}" for at in of}
        return {r.id: [-1.0 if r.id in right else -2.0, 0.0] for r in loaded.suite.requests}

    assert loaded.score(answers(range(200))) == {f"standin_choices/{at}": {"acc": 1.0} for at in range(0, 200, 4)}
    half = loaded.score(answers(range(100)))  # a second score is no mixture with the first
    wanted = [float(at < 100 or docs[at]["answer"] == 0) for at in range(0, 200, 4)]  # of equals the first is taken
    assert [scores["acc"] for scores in half.values()] == wanted
    assert 25 < sum(wanted) < 50


def test_a_copy_is_right_to_the_letter(stand_ins: dict[str, CapabilitySuite]) -> None:
    loaded = stand_ins["capability/standin_copy"]
    docs = rows("standin_copy")
    answers: dict[str, Answer] = {f"standin_copy/{at}/0": docs[at]["answer"] + ("" if at < 100 else "0") for at in range(200)}
    assert [scores["exact_match"] for scores in loaded.score(answers).values()] == [1.0] * 25 + [0.0] * 25


def test_the_digest_follows_from_the_items_alone(stand_ins: dict[str, CapabilitySuite]) -> None:
    again, fewer = (harness_tasks.load(["standin_copy"], limit=limit)[0].suite for limit in (50, 49))
    assert again.digest == stand_ins["capability/standin_copy"].suite.digest != fewer.digest


def write(path: Path, found: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def published(root: Path) -> Path:
    """Rows of our own in the columns of the published datasets."""
    members = yaml.safe_load((harness_tasks.files.SHIPPED / "mmlu/mmlu.yaml").read_text().replace("!function ", ""))["task"]
    subjects = [member["dataset_kwargs"]["subject"] for member in members]
    assert len(subjects) == 57

    def question(subject: str, n: int) -> dict[str, Any]:
        return {"question": f" {subject}: what is {n} + 1? ", "subject": subject, "choices": [str(n + k) for k in range(4)], "answer": 1}

    write(root / "mmlu/dev.jsonl", [question(s, n) for s in subjects for n in range(5)])
    write(root / "mmlu/test.jsonl", [question(s, n) for s in subjects for n in range(10, 13)])
    story = [
        {
            "ind": n, "activity_label": "Cooking", "ctx_a": f"A man takes {n} eggs.", "ctx_b": "he [title]", "ctx": "",
            "endings": [f"eats {k}. [step] x" for k in range(4)], "source_id": "a", "split": "x",
            "split_type": "b", "label": str(n % 4),
        }
        for n in range(30)
    ]  # fmt: skip
    write(root / "hellaswag/train.jsonl", story[:20])
    write(root / "hellaswag/validation.jsonl", story[20:])
    science = [
        {"id": f"q{n}", "question": f"Which is {n}?", "choices": {"text": [str(n), "x", "y"], "label": ["A", "B", "C"]}, "answerKey": "A"}
        for n in range(40)
    ]
    sums = [{"question": f"Ada has {n} eggs and buys 2. How many?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(12)]
    write(root / "gsm8k/train.jsonl", sums[:6])
    write(root / "gsm8k/test.jsonl", sums[6:])
    one = {"choices": ["No", "Yes"], "labels": [1, 0]}
    several = {"choices": ["No, never", "It does not", "Yes"], "labels": [1, 1, 0]}
    beliefs = [{"question": f"Does number {n} bring luck?", "mc1_targets": one, "mc2_targets": several} for n in range(4)]
    write(root / "truthfulqa/validation.jsonl", beliefs)
    write(root / "arc_challenge/train.jsonl", science[:30])
    write(root / "arc_challenge/test.jsonl", science[30:])
    return root


@pytest.mark.slow
def test_public_suites_are_asked_as_lm_eval_asks_them(tmp_path: Path) -> None:
    """Its own definitions, given the same rows, render the same contexts and choices."""
    import lm_eval.tasks as theirs
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    data = published(tmp_path)
    names = ["mmlu", "hellaswag", "arc_challenge", "gsm8k", "truthfulqa_mc1", "truthfulqa_mc2"]
    loaded = harness_tasks.load(names, limit=200, data_dir=data)
    assert [s.tasks[0].task.config.num_fewshot for s in loaded] == [5, 10, 25, 5, 0, 0]
    assert [s.primary for s in loaded] == ["acc", "acc_norm", "acc_norm", "exact_match", "acc", "acc"]
    assert [s.suite.num_items for s in loaded] == [171, 10, 10, 6, 4, 4]
    root = Path(theirs.__file__).parent
    files = harness_tasks.files

    def original(directory: str, task: str, split: dict[str, str], shots: int, **more: Any) -> list[tuple[str, str]]:
        config = load_yaml(root / directory / f"{task}.yaml") | {"num_fewshot": shots, "custom_dataset": files.operator}
        config |= {"dataset_kwargs": {"files": split, "data_dir": str(data), **more}}
        (built,) = TaskManager(include_defaults=False).load([config])["tasks"].values()
        built.set_fewshot_seed(1234)
        built.build_all_requests()
        return [instance.args for instance in built.instances]

    def continued(suite: CapabilitySuite) -> list[tuple[str, dict[str, Any]]]:
        options = {"do_sample": False, "max_gen_toks": 256}
        return [(r.text, options | {"until": list(r.stops)}) for r in suite.suite.requests if isinstance(r, Generate)]

    def ours(suite: CapabilitySuite, task: str) -> list[tuple[str, str]]:
        return [(r.context, r.continuation) for r in suite.suite.requests if isinstance(r, Likelihood) and r.id.startswith(f"{task}/")]

    mmlu = {"dev": "mmlu/dev", "test": "mmlu/test"}
    for subject in ("anatomy", "high_school_us_history"):
        expected = original("mmlu/default", f"mmlu_{subject}", mmlu, 5, subject=subject)
        assert ours(loaded[0], f"mmlu::{subject}") == expected
    stories = {"train": "hellaswag/train", "validation": "hellaswag/validation"}
    assert ours(loaded[1], "hellaswag") == original("hellaswag", "hellaswag", stories, 10)
    science = {"train": "arc_challenge/train", "test": "arc_challenge/test"}
    assert ours(loaded[2], "arc_challenge") == original("arc", "arc_challenge", science, 25)
    theirs_gsm8k = original("gsm8k", "gsm8k", {"train": "gsm8k/train", "test": "gsm8k/test"}, 5)
    wanted = [(text, {k: v for k, v in given.items() if k != "temperature"} | {"max_gen_toks": 256}) for text, given in theirs_gsm8k]
    assert continued(loaded[3]) == wanted  # type: ignore[attr-defined]
    for suite, task in zip(loaded[4:], ("truthfulqa_mc1", "truthfulqa_mc2"), strict=True):
        assert ours(suite, task) == original("truthfulqa", task, {"validation": "truthfulqa/validation"}, 0)


def test_gsm8k_compares_final_numbers_and_truthfulqa_the_truth_of_choices(tmp_path: Path) -> None:
    gsm8k, one, several = harness_tasks.load(["gsm8k", "truthfulqa_mc1", "truthfulqa_mc2"], limit=4, data_dir=published(tmp_path))
    texts = ["6 + 2 = 8\n#### 8", "So it is 9.", "#### 1,100", "#### 12\n\nQ"]
    scored = gsm8k.score({r.id: text for r, text in zip(gsm8k.suite.requests, texts, strict=True)})
    assert [(s["exact_match,strict-match"], s["exact_match,flexible-extract"]) for s in scored.values()] == [(1, 1), (0, 1), (0, 0), (1, 1)]
    assert all(next(iter(s)) == "exact_match,strict-match" for s in scored.values())
    likely: dict[str, Answer] = {r.id: [-2000.0 if r.id.endswith("/0") else -2001.0, 0.0] for r in one.suite.requests}
    assert {s["acc"] for s in one.score(likely).values()} == {1.0}
    shares: dict[str, Answer] = {r.id: [-2000.0 - int(r.id[-1]), 0.0] for r in several.suite.requests}
    mass = (1 + math.exp(-1)) / (1 + math.exp(-1) + math.exp(-2))
    assert [s["acc"] for s in several.score(shares).values()] == pytest.approx([mass] * 4)


DEFINITION = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{train: rows.jsonl, test: rows.jsonl}}}}
training_split: train
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""


def write_task(directory: Path, rest: str, task: str = "ours") -> Path:
    write(directory / "rows.jsonl", [{"question": f"{n} + {n} =", "answer": str(2 * n), "text": f"{n} and {n}."} for n in range(8)])
    (directory / f"{task}.yaml").write_text(DEFINITION.format(task=task, rest=rest))
    return directory


def load_one(directory: Path, rest: str, **more: Any) -> CapabilitySuite:
    return harness_tasks.load(["ours"], limit=8, task_dirs=[write_task(directory, rest)], **more)[0]


@pytest.mark.slow
def test_a_suite_of_the_operators_may_use_filters_groups_and_every_kind_of_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # files beside a definition are found from anywhere
    filtered = load_one(
        tmp_path / "a",
        'output_type: generate_until\nnum_fewshot: 2\nmetric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n'
        'filter_list: [{name: digits, filter: [{function: regex, regex_pattern: "(\\\\d+)"}, {function: take_first}]}]',
    )  # fmt: skip
    answers: dict[str, Answer] = {r.id: f"It is {2 * n}, I think" for n, r in enumerate(filtered.suite.requests)}
    scored = filtered.score(answers)
    assert all(list(scores) == ["exact_match,digits"] for scores in scored.values())
    assert sum(scores["exact_match,digits"] for scores in scored.values()) == 8
    again = harness_tasks.load(["ours"], limit=8, task_dirs=[tmp_path / "a"])[0]
    assert again.suite.digest == filtered.suite.digest  # the examples before a question are the same ones

    rolling = load_one(tmp_path / "b", "output_type: loglikelihood_rolling")
    assert [r for r in rolling.suite.requests if not isinstance(r, Likelihood) or r.context] == []
    (first, *_) = rolling.score({r.id: [-3.0, 0.0] for r in rolling.suite.requests}).values()
    assert first == {"byte_probability": pytest.approx(math.exp(-3.0 / len("0")))}

    (tmp_path / "a" / "group.yaml").write_text("group: both\ntask: [ours, standin_copy]\n")
    group = harness_tasks.load(["both"], limit=26, task_dirs=[tmp_path / "a"])[0]
    tasks = [item.split("/")[0] for item in group.score({r.id: "x" for r in group.suite.requests})]
    assert (tasks.count("ours"), tasks.count("standin_copy")) == (1, 25)


@pytest.mark.slow
def test_a_chat_template_is_used_where_a_task_asks_for_it(tmp_path: Path) -> None:
    rest = "output_type: generate_until\nmetadata: {version: 1, chat_template: true}"
    with pytest.raises(InvalidRequest, match="asks for a chat template"):
        load_one(tmp_path, rest)
    if not BASE.is_dir():
        pytest.skip("no demo model")
    request = load_one(tmp_path, rest, base_model_dir=BASE).suite.requests[0]
    assert isinstance(request, Generate)
    assert request.text == "<|im_start|>user\n0 + 0 =<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        pytest.param("output_type: generate_until\ngeneration_kwargs: {do_sample: true}", "greedy", id="sampling"),
        pytest.param("output_type: generate_until\nunsafe_code: true", "runs code", id="code"),
        pytest.param("output_type: generate_until\nmetric_list: [{metric: bleu}]", "no metric", id="a metric of the whole suite"),
        pytest.param(
            "output_type: multiple_choice\ndoc_to_choice: !function gone.choices", "cannot be loaded", id="python that is not there"
        ),
    ],
)
def test_a_task_that_cannot_be_asked_is_refused(tmp_path: Path, rest: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        load_one(tmp_path, rest)
    assert refused.value.code == "capability_suite_not_ready"


@pytest.mark.slow
def test_scores_are_those_of_lm_eval_on_the_same_model(stand_ins: dict[str, CapabilitySuite]) -> None:
    """Item by item: the harness's own model and loop, against our batches."""
    if not BASE.is_dir():
        pytest.skip("no demo model")
    import lm_eval
    from lm_eval.tasks import TaskManager

    from engine.evals.run.subject import Subject

    theirs = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(BASE), "dtype": "float32"}, tasks=["standin_choices", "standin_copy"], batch_size=16,
        device="cpu", task_manager=TaskManager(include_defaults=False, include_path=str(harness_tasks.files.SHIPPED)), bootstrap_iters=0,
        samples={name: list(range(0, 200, 4)) for name in ("standin_choices", "standin_copy")},
    )  # fmt: skip
    subject = Subject(BASE)
    for name, metric in (("standin_choices", "acc"), ("standin_copy", "exact_match")):
        suite = stand_ins[f"capability/{name}"]
        answers: dict[str, Answer] = {}
        for batch in subject.answer(suite.suite.requests):
            answers |= batch
        ours = {item: scores[metric] for item, scores in suite.score(answers).items()}
        assert ours == {f"{name}/{sample['doc_id']}": sample[metric] for sample in theirs["samples"][name]}
        assert 0.5 < sum(ours.values()) / len(ours) < 1.0
