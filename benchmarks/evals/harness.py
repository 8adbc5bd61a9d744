"""An evaluation of 200 multiple-choice items: ours against lm-evaluation-harness's own command line, on the same items and model.

    python -m benchmarks.evals.harness [--quick] [--out benchmarks/evals_harness_cpu_202611.json]

Two measures, each as wall clock and as CPU seconds (which hold on a machine that others use too), the ways taking turns:

* the whole command, process start included: ``python -m engine.evals.run.runner`` and ``python -m lm_eval``;
* the evaluation alone: a loaded model answers the requests, prompts and tokens included. lm-eval's is taken at its best batch size.

Without examples before a question, prompts share little; with five, a question's choices share all but their last words. The accuracy
must be exactly equal, and every item's score too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "examples" / "demo" / "base_model"
SHIPPED = REPOSITORY / "engine" / "evals" / "tasks"
ITEMS = 200
BATCH_SIZES = (1, 8, 32)
"""Of lm-eval: 1 is its default."""
SHOTS = (0, 5)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

Scores = dict[str, float]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", choices=("ours", "lm_eval"))
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.answer:
        way = answered_by_us if given.answer == "ours" else answered_by_lm_eval
        print(json.dumps(way(given.tasks, given.shots, given.batch_size)))
        return
    for result in compare(rounds=1 if given.quick else given.rounds, shots=SHOTS[:1] if given.quick else SHOTS):
        print(table(result), flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(*, rounds: int, shots: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """The result so far, after each case."""
    load_before, cases = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as directory:
        for number in shots:
            cases.append(_case(Path(directory), number, rounds))
            yield {
                "items": ITEMS,
                "threads": 1,
                "cores": os.cpu_count(),
                "rounds": rounds,
                "load_average": {"before": round(load_before, 1), "after": round(os.getloadavg()[0], 1)},
                "cases": list(cases),
            }


def _case(place: Path, shots: int, rounds: int) -> dict[str, Any]:
    tasks = write_task(place / "tasks", shots)

    def theirs(size: int) -> Callable[[int], dict[str, Any]]:
        return lambda number: their_command(tasks, shots, size, place / f"theirs-{shots}-{size}-{number}")

    def alone_by(way: str, size: int) -> Callable[[int], dict[str, Any]]:
        return lambda _: _answers(way, tasks, shots, size)

    commands: dict[str, Callable[[int], dict[str, Any]]] = {
        "ours": lambda number: our_command(tasks, shots, place / f"ours-{shots}-{number}"),
        **{f"lm_eval, batch size {size}": theirs(size) for size in (BATCH_SIZES[0], BATCH_SIZES[-1])},
    }
    whole = _in_turns(commands, rounds)
    answers = {"ours": alone_by("ours", 32)} | {f"lm_eval, batch size {size}": alone_by("lm_eval", size) for size in BATCH_SIZES}
    alone = _in_turns(answers, rounds)
    scores = [run["scores"] for runs in (*whole.values(), *alone.values()) for run in runs]
    return {
        "shots": shots,
        "accuracy": {way: statistics.mean(runs[0]["scores"].values()) for way, runs in whole.items()},
        "every_item_equal": all(found == scores[0] for found in scores),
        "command": _summary(whole),
        "evaluation": _summary(alone),
    }


def _in_turns(ways: dict[str, Callable[[int], dict[str, Any]]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(ways[name](number))
    return found


def _summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, and how many times as long as ours the best other way takes."""
    medians = {way: {key: round(statistics.median(r[key] for r in each), 2) for key in ("wall_s", "cpu_s")} for way, each in runs.items()}
    others = [way for way in runs if way != "ours"]
    ratios = {}
    for key in ("wall_s", "cpu_s"):
        best = min(others, key=lambda way: medians[way][key])
        ratios[f"best_other_to_ours_{key}"] = round(medians[best][key] / medians["ours"][key], 2)
    return {"ways": medians, **ratios}


def task_name(shots: int) -> str:
    return f"standin_choices_{shots}shot"


def write_task(directory: Path, shots: int) -> Path:
    """The stand-in suite with examples before each question, as an operator would add it."""
    directory.mkdir(parents=True, exist_ok=True)
    shipped = SHIPPED / "standin" / "standin_choices.yaml"
    lines = [f"include: {shipped}", f"task: {task_name(shots)}", f"num_fewshot: {shots}", "fewshot_split: test"]
    (directory / f"{task_name(shots)}.yaml").write_text("\n".join(lines) + "\n")
    return directory


def our_command(tasks: Path, shots: int, out: Path) -> dict[str, Any]:
    from engine.evals.run.run_file import EvalRun
    from engine.evals.run.run_status import read_eval_result

    run = EvalRun(
        base_model_dir=BASE, adapter_dir=None, golden=False, capability=(task_name(shots),), capability_limit=ITEMS, task_dirs=(tasks,),
        out_dir=out,
    )  # fmt: skip
    run.write(out / "run.json")
    used = _timed([sys.executable, "-m", "engine.evals.run.runner", str(out / "run.json")])
    scored = read_eval_result(out)["scored"]["base"][f"capability/{task_name(shots)}"]
    return used | {"scores": {item.split("/")[1]: metrics["acc"] for item, metrics in scored.items()}}


def their_command(tasks: Path, shots: int, batch_size: int, out: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={BASE},dtype=float32",
        "--tasks", task_name(shots), "--include_path", str(tasks),
        "--limit", str(ITEMS), "--device", "cpu", "--batch_size", str(batch_size),
        "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    used = _timed(command)
    (samples,) = out.glob("**/samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return used | {"scores": {str(row["doc_id"]): row["acc"] for row in rows}}


def _timed(command: list[str]) -> dict[str, Any]:
    """Seconds of a process by the wall clock and by the CPU, its children included."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=said, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{said.read().decode(errors='replace')[-2000:]}")
    return {"wall_s": time.monotonic() - began, "cpu_s": used.ru_utime + used.ru_stime}


def _answers(way: str, tasks: Path, shots: int, batch_size: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.evals.harness", "--answer", way, "--tasks", str(tasks), "--shots", str(shots),
        "--batch-size", str(batch_size),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answered_by_us(tasks: Path, shots: int, batch_size: int) -> dict[str, Any]:
    """What a loaded model takes for the requests, their tokens included."""
    from engine.evals.run.subject import Subject
    from engine.evals.suites import harness_tasks
    from engine.evals.suites.model_requests import Answer

    (suite,) = harness_tasks.load([task_name(shots)], limit=ITEMS, task_dirs=[tasks])
    subject = Subject(BASE, batch_size=batch_size)
    answers: dict[str, Answer] = {}
    began, began_cpu = time.monotonic(), time.process_time()
    with subject.applied(None):
        for batch in subject.answer(suite.suite.requests):
            answers |= batch
    used = {"wall_s": time.monotonic() - began, "cpu_s": time.process_time() - began_cpu}
    return used | {"scores": {item.split("/")[1]: metrics["acc"] for item, metrics in suite.score(answers).items()}}


def answered_by_lm_eval(tasks: Path, shots: int, batch_size: int) -> dict[str, Any]:
    """The same for the harness's model of transformers and its loop."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (task,) = TaskManager(include_defaults=False, include_path=str(tasks)).load([task_name(shots)])["tasks"].values()
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=ITEMS)
    model = HFLM(pretrained=str(BASE), dtype="float32", device="cpu", batch_size=batch_size)
    began, began_cpu = time.monotonic(), time.process_time()
    found = model.loglikelihood(task.instances, disable_tqdm=True)
    used = {"wall_s": time.monotonic() - began, "cpu_s": time.process_time() - began_cpu}
    for instance, response in zip(task.instances, found, strict=True):
        instance.resps.append(response)
    task.apply_filters()
    scores: Scores = {}
    for instance in task.instances:
        if instance.idx == 0:
            asked = sorted((i for i in task.instances if i.doc_id == instance.doc_id), key=lambda i: i.idx)
            responses = [i.filtered_resps["none"] for i in asked]
            scores[str(instance.doc_id)] = task.process_results(instance.doc, responses)["acc"]
    return used | {"scores": scores}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['items']} items, {result['threads']} thread, medians of {result['rounds']} turns; load {result['load_average']}",
        "| shots | measured | way | wall s | CPU s |", "|---|---|---|---:|---:|",
    ]  # fmt: skip
    for case in result["cases"]:
        for measured in ("command", "evaluation"):
            ways = case[measured]["ways"]
            lines += [f"| {case['shots']} | {measured} | {way} | {ways[way]['wall_s']} | {ways[way]['cpu_s']} |" for way in ways]
            wall, cpu = case[measured]["best_other_to_ours_wall_s"], case[measured]["best_other_to_ours_cpu_s"]
            lines.append(f"| {case['shots']} | {measured} | best other / ours | {wall} | {cpu} |")
        lines.append(f"accuracy {case['accuracy']}, every item equal: {case['every_item_equal']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
