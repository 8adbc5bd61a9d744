"""Has vLLM generate the answers of a run's suites, if it is installed; stores them in the journal before the model is loaded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.evals.run import run_file, vllm_engine
from engine.evals.run.heartbeat import Heart
from engine.evals.run.journal import Journal
from engine.evals.run.replicas import Part, directory, visible_devices
from engine.evals.run.run_file import EvalRun
from engine.evals.run.vllm_engine import Chunk, Engine, EngineRefused
from engine.evals.suites.model_requests import Generate
from engine.evals.suites.suite_items import Suite

SCRATCH = "vllm"
"""Directory of the engine's files, beside the journal."""
TRANSFORMERS = "transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """Which engine generates the texts of a run, for all of its subjects."""

    name: str = TRANSFORMERS
    why: str = ""
    """Why the engine that the run file names does not; empty if it does, or none is named."""
    suites: Mapping[str, str] = field(default_factory=dict)
    """The engine's environment by the digest of each suite that it has answered; the rest is answered by transformers."""


def generate(
    run: EvalRun,
    suites: Sequence[Suite],
    subjects: Sequence[str],
    heart: Heart,
    journal: Journal,
    *,
    gpus: Sequence[Any] | None,
    index: int,
) -> Generated:
    """Chooses the engine; if it is vLLM, has it answer this replica's part of the suites that only ask for texts.

    `gpus` of this replica; None: all that it sees.
    """
    if not run.vllm_python:
        return Generated()
    if run.replicas > 1:  # each replica would decide alone, and a suite of which one is refused an engine has no answers
        return Generated(why="it answers in one process, and this evaluation has several replicas")
    engine = _engine(run, gpus, directory(run.out_dir, index) / SCRATCH)
    if isinstance(engine, str):
        return Generated(why=engine)
    chosen = [suite for suite in suites if vllm_engine.is_generated(suite.requests)]
    try:
        _answer(run, engine, chosen, subjects, heart, journal, index)
    except EngineRefused as error:
        return Generated(why=str(error))
    return Generated(name=engine.environment.partition(",")[0], suites={suite.digest: engine.environment for suite in chosen})


def _engine(run: EvalRun, gpus: Sequence[Any] | None, scratch: Path) -> Engine | str:
    import torch  # takes seconds: the heartbeat is running by now

    visible = visible_devices(torch.cuda.device_count())
    devices = visible if gpus is None else visible[: len(gpus)]
    device, dtype = (torch.cuda.get_device_name(0), "bfloat16") if devices else ("cpu", "float32")
    return vllm_engine.find(run.vllm_python, devices=devices, device=device, dtype=dtype, scratch=scratch)


def _answer(
    run: EvalRun, engine: Engine, suites: Sequence[Suite], subjects: Sequence[str], heart: Heart, journal: Journal, index: int
) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from engine.data import ChatTokenizer
    from engine.evals.run.request_encoder import Encoder, batches, end_tokens, positions, text_of

    tokenizer: Any = AutoTokenizer.from_pretrained(run.base_model_dir, trust_remote_code=False)
    config: Any = AutoConfig.from_pretrained(run.base_model_dir, trust_remote_code=False)
    try:
        declared = GenerationConfig.from_pretrained(run.base_model_dir)
    except OSError:  # it has no file of its own
        declared = GenerationConfig.from_model_config(config)
    ends = end_tokens(declared.eos_token_id, tokenizer)
    encoder = Encoder(
        tokenizer, chat=ChatTokenizer.load(run.base_model_dir), context=positions(config.get_text_config(decoder=True), tokenizer)
    )
    chunks: list[Chunk] = []
    for name in subjects:
        for number, suite in enumerate(suites):
            key = run_file.known_answers_key(run.digest_of(name), engine.environment)
            if run_file.known_section(run, name, suite, engine.environment) is not None:
                continue
            part, done = Part(index=index, of=run.replicas, first=number), journal.everyones(key, suite.digest).answers
            heart.answered(len(journal.answered(key, suite.digest).answers), generated=False)
            texts = [request for request in suite.requests if isinstance(request, Generate)]
            for stops, budget, batch in batches(texts, encoder, size=vllm_engine.CHUNK):
                if part.has_next() and any(request.id not in done for request, _ in batch):
                    prompts = {request.id: prompt for request, prompt in batch}
                    chunks.append(Chunk(subject=name, suite=suite.digest, stops=stops, budget=budget, prompts=prompts))
    if not chunks:
        return

    def loading(subject: str) -> None:
        heart.phase("loading", subject=subject)

    places = {"adapter": run.adapter_dir, "previous": run.previous_adapter_dir}
    directories = {name: place for name, place in places.items() if name in subjects and place is not None}
    answered = engine.answer(chunks, directories, run.base_model_dir, context=encoder.context, ends=ends, loading=loading)
    for chunk, tokens, seconds in answered:
        heart.phase("answering", subject=chunk.subject)
        answers = {id_: text_of(ids, tokenizer, ends=ends, stops=chunk.stops) for id_, ids in tokens.items()}
        journal.append(run_file.known_answers_key(run.digest_of(chunk.subject), engine.environment), chunk.suite, answers, seconds=seconds)
        heart.answered(len(answers), generated=True)
