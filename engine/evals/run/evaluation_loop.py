"""Runs every suite on every subject, and stores each answer immediately.

1. The base answers first: it is the reference, and the application check needs its answers.
2. Before it is scored, the adapter must be shown to change the base's logits on prompts of the job itself.
3. Answers come from earlier results (``known``), from the journal of an interrupted run, or from the model.
4. Where vLLM is installed it generates, before the model is loaded here; everything else is computed here (:mod:`.vllm_engine`).
5. With several replicas each answers its part of every suite; the first one then reads the journals of all (:mod:`.replicas`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from core.errors import InvalidRequest
from engine.evals.run import generated_answers, replicas, run_file
from engine.evals.run.heartbeat import Heart, Milestones
from engine.evals.run.journal import Journal
from engine.evals.run.replicas import Part, Replicas
from engine.evals.run.run_file import EvalRun
from engine.evals.suites import suite_items
from engine.evals.suites.model_requests import Answer, Generate, Loss
from engine.evals.suites.suite_items import Suite

if TYPE_CHECKING:
    from engine.evals.run.subject import Subject
    from engine.evals.suites.harness_tasks import CapabilitySuite

PROOF_PROMPTS = 8
"""Prompts of the job's own items on which the adapter must show an effect; it fails if it shows none on any."""
PROOF_PROMPT = "Say something."
"""Used if there are no items."""
PROOF_TOKENS = 512
"""Most tokens read of such a prompt: its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One subject's answers to one suite, as stored in the result."""

    digest: str
    environment: str
    answers: Mapping[str, Answer]
    """In the order of the suite's requests."""
    seconds: float
    """Of all replicas together."""
    cached: bool
    """Whether they were known from an earlier evaluation."""
    cut: int | None = None
    """Requests that did not fit completely; None if cached."""


class Evaluation:
    """One run: its suites, the model, and the answers so far; of replica `index`."""

    def __init__(self, run: EvalRun, heart: Heart, journal: Journal, *, others: Replicas | None = None, index: int = 0) -> None:
        """`others`: the replicas that this process starts and waits for, if it is the first of several."""
        self.run, self.heart, self.journal = run, heart, journal
        self.others, self.index = others, index
        self.milestones = Milestones(replicas.directory(run.out_dir, index))
        plain, self.preferences = run_file.plain_suites(run)
        self.capability = self._capability()
        self.suites: tuple[Suite, ...] = (*plain, *(c.suite for c in self.capability))
        self.subjects = run_file.subjects(run)
        self.asked: list[str] = []
        """Subjects that have answered this replica's part."""
        self.found: dict[str, object] = {"applied": None, "error": None}
        heart.plan(run_file.num_requests(run, self.suites))
        heart.phase("loading", subject="base")
        from engine.evals.run.subject import Subject  # torch and PEFT take seconds: the heartbeat is running by now

        gpus = self._gpus()
        self.generated = generated_answers.generate(run, self.suites, self.subjects, heart, journal, gpus=gpus, index=index)
        heart.phase("loading", subject="base")
        self.subject: Subject = Subject(run.base_model_dir, batch_size=run.batch_size, gpus=gpus, on_step=heart.step)
        self.milestones.passed("planned", subjects=self.subjects, suites={suite.id: suite.num_items for suite in self.suites})

    def _gpus(self) -> Sequence[Any] | None:
        """Returns the GPUs of this process, after starting the other replicas with theirs; None for all that it sees."""
        if self.others is None:
            return None
        import torch

        devices = replicas.visible_devices(torch.cuda.device_count())
        own = replicas.share_of(devices, 0, self.run.replicas)
        self.others.start(devices)
        return [torch.device("cuda", number) for number in range(len(own))]

    def answer(self) -> None:
        """Has every subject answer this replica's part."""
        with self.subject.applied(None):
            self._ask("base")
        if self.run.adapter_dir:
            self._evaluate_adapter()

    def result(self) -> Mapping[str, Any]:
        """Returns the result file's content, once the other replicas have answered theirs."""
        self.answer()
        if self.others is not None:
            self.others.wait()
            own = replicas.directory(self.run.out_dir, self.index) / run_file.JOURNAL_NAME
            self.journal.read_beside([path for path in replicas.journals(self.run.out_dir) if path != own])
        answered = {name: {suite.id: self._section(name, suite) for suite in self.suites} for name in self.asked}
        return {
            "format": run_file.FORMAT,
            "environment": self.subject.environment,
            "digests": {name: self.run.digest_of(name) for name in self.subjects},
            "preferences": self.preferences,
            "suites": {s.id: {"kind": s.kind, "digest": s.digest, "num_items": s.num_items, "version": s.version} for s in self.suites},
            "subjects": {
                name: {id_: asdict(section) for id_, section in answered[name].items()} if name in answered else None
                for name in ("base", "adapter", "previous")
            },
            "scored": {
                name: {c.suite.id: c.score(sections[c.suite.id].answers) for c in self.capability} for name, sections in answered.items()
            },
            **self.found,
            "num_gpus": self.subject.num_gpus * self.run.replicas,
            "replicas": self.run.replicas,
            "engine": {"name": self.generated.name, "why": self.generated.why},
            "seconds": sum(s.seconds for sections in answered.values() for s in sections.values() if not s.cached) / self.run.replicas,
        }

    def _evaluate_adapter(self) -> None:
        """Proves that the adapter is applied and has it answer; then the last accepted one."""
        prompts = self._proof_prompts()
        with self.subject.applied(None):
            base = self.subject.logits(prompts)
        self.heart.phase("proof", subject="adapter")
        try:
            self._add("adapter", self.run.adapter_dir)
            with self.subject.applied("adapter"):
                difference = self.subject.difference(prompts, base)
                self.found["applied"] = {
                    "applied": difference.largest > 0.0,
                    "max_logit_difference": min(difference.largest, sys.float_info.max),
                    "num_prompts": difference.num_prompts,
                    "num_different": difference.num_different,
                }
                if not difference.largest > 0.0:
                    self.found["error"] = _unapplied(difference.num_prompts).to_dict()
                    return
                self._ask("adapter")
        except InvalidRequest as e:
            if e.code != run_file.ADAPTER_UNLOADABLE:
                raise
            self.found["error"] = e.to_dict()
            return
        if self.run.previous_adapter_dir:
            self._evaluate_previous()

    def _evaluate_previous(self) -> None:
        """The last accepted adapter is only a comparison: if it cannot be loaded, it is omitted."""
        try:
            if not (known := self._known_whole("previous")):
                self._add("previous", self.run.previous_adapter_dir)
            with nullcontext() if known else self.subject.applied("previous"):
                self._ask("previous")
        except InvalidRequest as e:
            self.found["previous_error"] = e.to_dict()

    def _add(self, name: str, directory: Any) -> None:
        self.heart.phase("loading", subject=name)
        self.subject.add(name, directory)

    def _ask(self, name: str) -> None:
        """Has a subject answer this replica's part of each suite."""
        for number, suite in enumerate(self.suites):
            self.heart.phase("answering", subject=name, suite=suite.id)
            if self._known(name, suite) is not None:
                self.heart.answered(len(suite.requests) if self.index == 0 else 0, generated=False)
            elif suite.digest not in self.generated.suites:
                self._answer(name, suite, Part(index=self.index, of=self.run.replicas, first=number))
            if self.run.replicas == 1:
                self._section(name, suite)
        self.asked.append(name)

    def _section(self, name: str, suite: Suite) -> Section:
        """Returns one subject's answers to one suite, in the order of its requests, and tells that they are complete."""
        known, everyones = self._known(name, suite), self.journal.everyones(self._journaled(name, suite), suite.digest)
        ids = [request.id for request in suite.requests]
        answers, seconds = (everyones.answers, everyones.seconds) if known is None else (known["answers"], float(known["seconds"]))
        cut = self.subject.encoder.cut(suite.requests) if known is None else None
        facts = {"num_items": suite.num_items, "seconds": round(seconds, 3), "cached": known is not None}
        self.milestones.passed("answered", subject=name, suite=suite.id, **facts)
        return Section(
            digest=suite.digest,
            environment=self._environment(suite),
            answers={id_: answers[id_] for id_ in ids},
            seconds=seconds,
            cached=known is not None,
            cut=cut,
        )

    def _known(self, name: str, suite: Suite) -> Mapping[str, Any] | None:
        return run_file.known_section(self.run, name, suite, self._environment(suite))

    def _known_whole(self, name: str) -> bool:
        """Returns whether everything is answered: then the model need not be loaded."""
        return all(self._known(name, suite) is not None or not self._left(name, suite) for suite in self.suites)

    def _left(self, name: str, suite: Suite) -> bool:
        answers = self.journal.everyones(self._journaled(name, suite), suite.digest).answers
        return any(request.id not in answers for request in suite.requests)

    def _environment(self, suite: Suite) -> str:
        return self.generated.suites.get(suite.digest, self.subject.environment)

    def _journaled(self, name: str, suite: Suite) -> str:
        """Returns a subject's key in the journal: an interrupted run may continue on other hardware, which answers differently."""
        return run_file.known_answers_key(self.run.digest_of(name), self._environment(suite))

    def _answer(self, name: str, suite: Suite, part: Part) -> None:
        """Stores the answers of `part` that no journal has."""
        subject = self._journaled(name, suite)
        kept, done = self.journal.answered(subject, suite.digest), frozenset(self.journal.everyones(subject, suite.digest).answers)
        self.heart.answered(len(kept.answers), generated=False)
        if self._left(name, suite):
            began = time.monotonic()
            for batch in self.subject.answer(suite.requests, skip=done, part=part):
                self.heart.answered(sum(id_ not in kept.answers for id_ in batch), generated=True)
                self.journal.append(subject, suite.digest, batch, seconds=time.monotonic() - began)
                began = time.monotonic()
                if self.others is not None:
                    self.others.check()

    def _capability(self) -> Sequence[CapabilitySuite]:
        """Returns suites made of harness tasks; importing the harness takes seconds."""
        if not self.run.capability:
            return ()
        self.heart.phase("capability")
        from engine.evals.suites import harness_tasks

        run = self.run
        return harness_tasks.load(
            run.capability, limit=run.capability_limit, task_dirs=run.task_dirs, data_dir=run.data_dir, base_model_dir=run.base_model_dir
        )

    def _proof_prompts(self) -> list[list[int]]:
        """Returns tokens of some prompts of the job's own: its holdout, else its validation text, else the golden set."""
        by_kind = {suite.kind: suite for suite in self.suites}
        found: list[list[int]] = []
        for kind in ("holdout", "validation", "golden"):
            suite, space = by_kind.get(kind), PROOF_PROMPTS - len(found)
            for at in suite_items.spread(len(suite.requests), space) if suite else []:
                request = suite.requests[at] if suite else None
                if isinstance(request, Generate):
                    found.append(list(self.subject.encoder.prompt(request).ids))
                elif isinstance(request, Loss):
                    found.append(list(request.input_ids))
        if found:
            return [ids[-PROOF_TOKENS:] for ids in found]
        encoder = self.subject.encoder
        chat = self.run.has_chat_template
        return [encoder.render([{"role": "user", "content": PROOF_PROMPT}]) if chat else encoder.encode(PROOF_PROMPT)]


def _unapplied(num_prompts: int) -> InvalidRequest:
    return InvalidRequest(
        f"training changed nothing: the logits of {num_prompts} prompts equal the base model's; look at whether training moved the weights",
        code=run_file.ADAPTER_NOT_APPLIED,
    )
