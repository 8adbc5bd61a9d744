"""Capability suites: tasks of lm-evaluation-harness, run through our own batches and scored by the harness.

lm-eval renders the prompts (templates, examples, choices) and computes each item's metrics from the answers (filters, ``process_results``),
so a score equals that of its command line; the model answers through our own batches in between. The few-shot examples of a question follow
from lm-eval's own seed and the items: the same items always have the same prompts, those of ``lm_eval --samples``.

Of an item's metrics those are kept that are a number of which more is better and whose suite score is their mean; the gate uses the first
(``metadata.primary`` of a task names it). Loaded in the evaluation process only: lm-eval imports torch.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from core.errors import FtError, InvalidRequest
from engine.data import ChatTokenizer
from engine.evals.suites import model_requests, task_files
from engine.evals.suites.suite_items import CAPABILITY, Suite, spread
from engine.evals.suites.task_files import Definition
from engine.evals.tasks import files

FEWSHOT_SEED = 1234
"""The default of lm-eval's command line: the examples drawn from it are the same."""
BYTE_PROBABILITY = "byte_probability"
"""For rolling likelihoods: the geometric mean of a byte's probability, 2 to the power of minus lm-eval's ``bits_per_byte``."""

Chat = Callable[..., str]
"""``(messages, add_generation_prompt=...) -> prompt``: the chat template of the base model."""
Item = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class CapabilitySuite:
    """A loaded suite: its requests, and how answers are scored."""

    suite: Suite
    primary: str
    """The metric that the gate uses."""
    tasks: tuple[_TaskRequests, ...]

    def score(self, answers: model_requests.Answers) -> dict[str, Item]:
        """Each item's metrics, the primary one first."""
        return {item: scores for task in self.tasks for item, scores in task.score(answers)}


@dataclass(frozen=True, kw_only=True)
class _TaskRequests:
    """One task of lm-eval with the requests that it built."""

    name: str
    task: Any
    docs: tuple[int, ...]
    """Indexes of the items among all of the task."""
    primary: str

    def rendered(self) -> Iterator[model_requests.Request]:
        for instance in self.task.instances:
            yield _request(self._id(instance), instance, self.name)

    def score(self, answers: model_requests.Answers) -> Iterator[tuple[str, Item]]:
        instances: dict[int, list[Any]] = defaultdict(list)
        for instance in self.task.instances:
            instance.resps = [_response(instance.request_type, answers[self._id(instance)])] * instance.repeats
            instance.filtered_resps = {}
            instances[instance.doc_id].append(instance)
        self.task.apply_filters()
        kept = _kept(self.task)
        for at, requested in instances.items():
            requested.sort(key=lambda instance: instance.idx)
            scores: Item = {}
            for key in requested[0].filtered_resps:
                found = self.task.process_results(requested[0].doc, [instance.filtered_resps[key] for instance in requested])
                suffix = "" if key == "none" else f",{key}"
                scores |= {f"{name}{suffix}": value for name, value in _numbers(found, kept, self.task.OUTPUT_TYPE).items()}
            yield f"{self.name}/{self.docs[at]}", _first(self.primary, scores)

    def _id(self, instance: Any) -> str:
        return f"{self.name}/{self.docs[instance.doc_id]}/{instance.idx}"


def load(
    names: Sequence[str],
    *,
    limit: int,
    task_dirs: Sequence[Path] = (),
    data_dir: Path | None = None,
    base_model_dir: Path | None = None,
) -> tuple[CapabilitySuite, ...]:
    """Returns the suites `names`, each with at most `limit` items, evenly spread over its items.

    The model of `base_model_dir` provides the chat template for tasks whose ``metadata.chat_template`` is true; as in lm-eval, no other
    prompt has one.
    """
    task_files.check_suites(names, task_dirs, data_dir)
    definitions = task_files.find(task_dirs)
    manager = _manager(definitions, task_dirs, data_dir)
    chat = partial(_chat, base_model_dir) if base_model_dir else None
    return tuple(_suite(definitions[name], _built(manager, name), limit, chat) for name in names)


def _suite(definition: Definition, built: Mapping[str, Any], limit: int, chat: Chat | None) -> CapabilitySuite:
    chosen = _chosen({name: len(task.eval_docs) for name, task in built.items()}, limit)
    requested = tuple(
        _TaskRequests(name=name, task=_ask(built[name], docs, chat, name), docs=docs, primary=_primary(built[name], name))
        for name, docs in chosen.items()
    )
    suite = Suite(
        id=f"{CAPABILITY}/{definition.name}",
        kind="capability",
        requests=tuple(request for task in requested for request in task.rendered()),
        version=f"{_version(definition, requested)} (lm-eval {metadata.version('lm-eval')})",
        num_items=sum(len(task.docs) for task in requested),
    )
    return CapabilitySuite(suite=suite, primary=requested[0].primary, tasks=requested)


def _manager(definitions: Mapping[str, Definition], task_dirs: Sequence[Path], data_dir: Path | None) -> Any:
    """Returns lm-eval's index of our definitions, without its own."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about the definitions' choices, not about a run
    about = {"data_dir": str(data_dir)} if data_dir else None
    manager = TaskManager(include_defaults=False, include_path=[str(files.SHIPPED), *map(str, task_dirs)], metadata=about)
    _place_files(manager, definitions)
    return manager


def _built(manager: Any, name: str) -> Mapping[str, Any]:
    """Returns lm-eval's own tasks of a suite, by name."""
    try:
        loaded = dict(manager.load([name])["tasks"])
    except FtError:
        raise
    except Exception as e:  # a definition may run foreign code: whatever it raises, the suite cannot run
        raise InvalidRequest(f"capability suite {name!r} cannot be loaded: {type(e).__name__}: {e}", code=files.NOT_READY) from e
    for key, task in loaded.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InvalidRequest(f"task {key} runs code or needs more than text; only text tasks are supported", code=files.NOT_READY)
    return loaded


def _chat(base_model_dir: Path, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
    """Returns turns rendered by the base model's chat template; a started answer stays open."""
    text = _tokenizer(base_model_dir).render_text(messages, add_generation_prompt=add_generation_prompt)
    if add_generation_prompt or not messages:
        return text
    begun = messages[-1]["content"]
    end = text.rindex(begun.strip())
    kept = text[end : end + len(begun.lstrip())]  # with the space at its end, unless the template trims
    return text[:end] + (kept if kept == begun.lstrip() else begun.strip())


@cache
def _tokenizer(base_model_dir: Path) -> ChatTokenizer:
    """Loads the template of the model's own files, as in training: templates see the same date there and here."""
    return ChatTokenizer.load(base_model_dir)


def _place_files(manager: Any, definitions: Mapping[str, Definition]) -> None:
    """Resolves relative ``data_files`` beside the definition, wherever the process runs."""
    from lm_eval.tasks._yaml_loader import load_yaml

    for name, definition in definitions.items():
        if definition.error or definition.is_group or definition.config.get("dataset_path") not in task_files.BUILDERS:
            continue
        try:
            config = load_yaml(definition.path)
        except Exception:  # it names Python that does not exist: reported when this one is loaded, the others may run
            continue
        absolute = {split: str(path) for split, path in task_files.absolute_files(config, definition.path.parent).items()}
        entry = manager.task_index[name]
        entry.yaml_path, entry.cfg = None, config | {"dataset_kwargs": (config.get("dataset_kwargs") or {}) | {"data_files": absolute}}


def _chosen(sizes: Mapping[str, int], limit: int) -> dict[str, tuple[int, ...]]:
    """Returns the indexes of the items by task; a task of a group without chosen items is left out."""
    places = [(name, at) for name, size in sizes.items() for at in range(size)]
    chosen: dict[str, list[int]] = {}
    for place in spread(len(places), limit):
        name, at = places[place]
        chosen.setdefault(name, []).append(at)
    return {name: tuple(docs) for name, docs in chosen.items()}


def _ask(task: Any, docs: tuple[int, ...], chat: Chat | None, name: str) -> Any:
    templated = bool((task.config.metadata or {}).get("chat_template"))
    if templated and chat is None:
        raise InvalidRequest(f"task {name} asks for a chat template, and the base model has none", code=files.NOT_READY)
    sampling = task.config.generation_kwargs or {}
    if sampling.get("do_sample") or sampling.get("temperature"):
        raise InvalidRequest(f"task {name} asks for sampling; evaluations are greedy: set do_sample to false", code=files.NOT_READY)
    task.set_fewshot_seed(FEWSHOT_SEED)
    task.build_all_requests(
        samples=list(docs),
        apply_chat_template=templated,
        fewshot_as_multiturn=templated,
        chat_template=chat if templated else None,
    )
    return task


def _request(id_: str, instance: Any, task: str) -> model_requests.Request:
    if instance.request_type == "generate_until":
        context, given = instance.args
        until = given.get("until") or []
        stops = tuple([until] if isinstance(until, str) else until)
        return model_requests.Generate(id=id_, text=context, max_new_tokens=int(given.get("max_gen_toks", 256)), stops=stops)
    if instance.request_type == "loglikelihood":
        context, continuation = instance.args
        return model_requests.Likelihood(id=id_, context=context, continuation=continuation)
    if instance.request_type == "loglikelihood_rolling":
        return model_requests.Likelihood(id=id_, context="", continuation=instance.args[0])
    raise InvalidRequest(f"task {task} asks for {instance.request_type}, which is not supported", code=files.NOT_READY)


def _response(kind: str, answer: model_requests.Answer) -> Any:
    if kind == "generate_until":
        return answer
    assert isinstance(answer, list)
    return float(answer[0]) if kind == "loglikelihood_rolling" else (float(answer[0]), bool(answer[1]))


def _kept(task: Any) -> list[str]:
    """Returns metrics of which more is better and whose mean over items is the suite's score."""
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return [BYTE_PROBABILITY]
    averages, better = task.aggregation(), task.higher_is_better()
    return [
        name for name, average in averages.items() if getattr(average, "__name__", "") in {"mean", "nanmean"} and better.get(name, True)
    ]


def _primary(task: Any, name: str) -> str:
    kept = _kept(task)
    wanted = (task.config.metadata or {}).get("primary")
    if not kept or (wanted and wanted not in kept):
        raise InvalidRequest(
            f"task {name} has no metric{f' {wanted!r}' if wanted else ''} that is a mean over items of which more is better",
            code=files.NOT_READY,
        )
    return str(wanted or kept[0])


def _numbers(found: Mapping[str, Any], kept: Sequence[str], output: str) -> Item:
    if output == "loglikelihood_rolling":
        pair = next((found[name] for name in ("bits_per_byte", "byte_perplexity") if name in found), None)
        return {BYTE_PROBABILITY: math.exp(pair[0] / max(1, pair[1]))} if pair else {}
    return {name: float(value) for name, value in found.items() if name in kept and isinstance(value, int | float)}


def _first(primary: str, scores: Item) -> Item:
    """Returns the same scores with the primary one first; for a task with filters, its first filter's."""
    leading = next((name for name in scores if name == primary or name.startswith(f"{primary},")), None)
    return scores if leading is None else {leading: scores[leading]} | scores


def _version(definition: Definition, requested: Sequence[_TaskRequests]) -> str:
    own = definition.metadata.get("version")
    return str(own) if own is not None else ", ".join(dict.fromkeys(str(task.task.VERSION) for task in requested))
