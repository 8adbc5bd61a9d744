"""Input of ``python -m engine.evals.run.runner RUN.json`` and its output: ``eval-result.json``, format 2.

Every subject (``base``, ``adapter``, ``previous``) has the answers of every suite: scores are computed from them afterwards
(:mod:`engine.evals.scoring.report`), so a new metric needs no new answers, and answers can be kept by digest and passed again as
``known``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from core.base_models import read_template
from core.durable_files import write_json
from core.errors import InvalidRequest
from core.typed_json import from_json
from engine.evals.run.run_status import HEARTBEAT_NAME as HEARTBEAT_NAME
from engine.evals.run.run_status import JOURNAL_NAME as JOURNAL_NAME
from engine.evals.run.run_status import MILESTONES_NAME as MILESTONES_NAME
from engine.evals.run.run_status import RESULT_NAME as RESULT_NAME
from engine.evals.suites import preferences, safety, suite_items
from engine.evals.suites.safety import BUILTIN_CLASSIFIER
from engine.evals.suites.suite_items import Suite

FORMAT = 2
SAMPLES_NAME = "samples.jsonl"
ADAPTER_NOT_APPLIED, ADAPTER_UNLOADABLE = "adapter_not_applied", "adapter_unloadable"

Known = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Sections of earlier results by subject and :func:`known_key` of suite and environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRun:
    base_model_dir: Path
    adapter_dir: Path | None
    """The adapter or whole model to judge; None scores only the base."""
    previous_adapter_dir: Path | None = None
    """The last accepted adapter of the same lineage, for comparison."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digest of each subject, the key of its answers in the journal. A subject without one is identified by its directory."""
    holdout: Path | None = None
    """JSONL of items (see :mod:`engine.evals.suites.suite_items`)."""
    scored_suites: Path | None = None
    """Directory with the items of the tenant's scored suites, ``NAME@VERSION.jsonl``, in the form of `holdout`."""
    golden: bool = True
    validation_pack_dir: Path | None = None
    """Directory of a pack, or of a mixture's packs, whose ``val-*.parquet`` windows give the perplexity."""
    max_new_tokens: int = 256
    max_items: int = 200
    capability: tuple[str, ...] = ()
    """Capability suites by name."""
    capability_limit: int = 1000
    task_dirs: tuple[Path, ...] = ()
    """Additional directories of capability suites, besides the shipped ones."""
    data_dir: Path | None = None
    """Data directory of capability suites."""
    safety: bool = False
    classifier: str = BUILTIN_CLASSIFIER
    """Id of the refusal classifier (:func:`engine.evals.suites.safety.classifier_id`), a part of the suite's digest: it classifies the
    stored answers afterwards."""
    batch_size: int | None = None
    """Prompts generated together; None for what suits the device. In fp32 (on CPUs) it affects only speed; in bf16 the other prompts of a
    batch can change a token of an answer, so it is part of the key under which answers are kept."""
    replicas: int = 1
    """Processes that each hold a copy of the base, on an equal share of the GPUs, and answer a part of the batches
    (:mod:`engine.evals.run.replicas`)."""
    vllm_python: str = ""
    """Python of an environment with vLLM on the node that runs this (:mod:`engine.evals.run.vllm_engine`); empty: transformers
    generates."""
    known: Known = field(default_factory=dict)
    """Answers that need not be generated: those whose suite has the same digest in this run, given in the same environment."""
    out_dir: Path

    @property
    def decoding(self) -> suite_items.Decoding:
        return suite_items.Decoding.limited(self.max_new_tokens)

    @property
    def has_chat_template(self) -> bool:
        return read_template(self.base_model_dir) is not None

    def holdout_items(self) -> list[suite_items.Item]:
        return suite_items.read_items(self.holdout)[: self.max_items] if self.holdout else []

    def digest_of(self, subject: str) -> str:
        places = {"base": self.base_model_dir, "adapter": self.adapter_dir, "previous": self.previous_adapter_dir}
        return self.digests.get(subject) or str(places.get(subject, subject))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parses a run file; refuses an unknown, missing or impossible field by name."""
        body = _with_staged(json.loads(path.read_text(encoding="utf-8")))
        known = {f.name for f in fields(cls)}
        missing = {"base_model_dir", "adapter_dir", "out_dir"} - set(body)
        if set(body) - known or missing:
            raise InvalidRequest(
                f"run file {path}: unknown fields {sorted(set(body) - known)}, missing fields {sorted(missing)}", code="bad_run_file"
            )
        for key in ("max_new_tokens", "max_items", "batch_size", "capability_limit", "replicas"):
            if body.get(key) is not None and (not isinstance(body[key], int) or body[key] < 1):
                raise InvalidRequest(f"run file {path}: {key} {body[key]!r} is not a whole number of at least 1", code="bad_run_file")
        run = from_json(cls, body)
        places = [(key, getattr(run, key)) for key in STAGED_PATHS if key != "out_dir"] + [("task_dirs", p) for p in run.task_dirs]
        for key, place in places:
            if place is not None and not place.exists():
                raise InvalidRequest(f"run file {path}: {key} {place} does not exist", code="bad_run_file")
        return run


QUESTION_DIR, SUITES_DIR = "question_dir", "suites_dir"
HOLDOUT_NAME, SCORED_NAME, KNOWN_NAME, TASKS_NAME, DATA_NAME = "holdout.jsonl", "scored_suites", "known.json", "tasks", "data"


def _with_staged(body: dict[str, Any]) -> dict[str, Any]:
    """Replaces the directories that an agent stages by the fields that are in them: held-out items, scored suites and known answers in
    ``question_dir``, the operator's capability suites and their data in ``suites_dir``."""
    if (question := body.pop(QUESTION_DIR, None)) is not None:
        body["known"] = json.loads((Path(question) / KNOWN_NAME).read_text(encoding="utf-8"))
        body["holdout"] = str(Path(question) / HOLDOUT_NAME)
        body["scored_suites"] = str(Path(question) / SCORED_NAME) if (Path(question) / SCORED_NAME).is_dir() else None
    if (suites := body.pop(SUITES_DIR, None)) is not None:
        body["task_dirs"] = [str(place) for place in sorted((Path(suites) / TASKS_NAME).glob("*"))]
        body["data_dir"] = str(Path(suites) / DATA_NAME) if (Path(suites) / DATA_NAME).is_dir() else None
    return body


STAGED_PATHS = (
    "base_model_dir", "adapter_dir", "previous_adapter_dir", "holdout", "scored_suites", "validation_pack_dir", "data_dir", "out_dir",
)  # fmt: skip


def known_answers_key(digest: str, environment: str) -> str:
    """Environment on which answers depend: device, precision, versions of libraries."""
    return f"{digest}@{environment}"


def known_section(run: EvalRun, subject: str, suite: Suite, environment: str) -> Mapping[str, Any] | None:
    """Returns a subject's answers to `suite` from an earlier result, if they are complete."""
    found = run.known.get(subject, {}).get(known_answers_key(suite.digest, environment))
    whole = found is not None and all(request.id in found["answers"] for request in suite.requests)
    return found if whole else None


def capability_id(name: str) -> str:
    """Returns the suite id of a capability suite."""
    return f"{suite_items.CAPABILITY}/{name}"


def plain_suites(run: EvalRun) -> tuple[tuple[Suite, ...], preferences.Kind | None]:
    """Returns the suites of a run that are built without a model or a harness, and the kind of held-out preferences.

    The same wherever it is called: a caller that knows the run knows the digests of answers that may exist already. Golden and safety
    prompts are conversations, so a base without a chat template is not given them.
    """
    found: list[Suite] = []
    if items := run.holdout_items():
        longest = longest_answer(run.base_model_dir, [item.expected or "" for item in items])
        thought = longest_answer(run.base_model_dir, [item.reasoning for item in items])
        found.append(suite_items.holdout_suite(items, run.decoding, longest_expected=longest, longest_reasoning=thought))
    found += _scored(run)
    if run.golden and run.has_chat_template:
        found.append(suite_items.golden_suite(run.decoding))
    if run.safety and run.has_chat_template:
        found.append(safety.suite(run.decoding, run.classifier))
    kind: preferences.Kind | None = None
    if run.validation_pack_dir:
        held_out, kind = suite_items.validation_suites(run.validation_pack_dir, limit=run.max_items)
        found += held_out
    return tuple(found), kind


def _scored(run: EvalRun) -> Iterator[Suite]:
    for path in sorted(run.scored_suites.glob("*.jsonl")) if run.scored_suites else ():
        name, _, version = path.stem.rpartition("@")
        items = suite_items.read_items(path)
        longest = longest_answer(run.base_model_dir, [item.expected or "" for item in items])
        thought = longest_answer(run.base_model_dir, [item.reasoning for item in items])
        yield suite_items.scored_suite(name, version, items, run.decoding, longest_expected=longest, longest_reasoning=thought)


def subjects(run: EvalRun) -> list[str]:
    """Subjects of the run: ``base``, ``adapter``, ``previous``."""
    places = {"base": run.base_model_dir, "adapter": run.adapter_dir, "previous": run.previous_adapter_dir if run.adapter_dir else None}
    return [name for name, place in places.items() if place is not None]


def num_requests(run: EvalRun, chosen: Iterable[Suite]) -> int:
    """Number of requests of the suites `chosen`, of all subjects together."""
    return len(subjects(run)) * sum(len(suite.requests) for suite in chosen)


def longest_answer(base_model_dir: Path, texts: list[str]) -> int | None:
    """Returns the tokens of the longest of `texts`; None if the model has no ``tokenizer.json``."""
    place = base_model_dir / "tokenizer.json"
    if not place.is_file():
        return None
    encoded = Tokenizer.from_file(str(place)).encode_batch_fast(texts, add_special_tokens=False)
    return max((len(e) for e in encoded), default=0)
