"""Plugins of a vLLM server that serves the platform's adapters.

Five, to be named in ``VLLM_PLUGINS``; vLLM calls each in all of its processes, so vLLM itself is imported only inside of them.

``ft_adapter_index``    answers the first request for an adapter that is in the platform's index, without waiting to be told to load it.
``ft_base_rows``        on CPU: base requests batched with adapter requests keep to the base.
``ft_free_on_unload``   an unload frees the weights, once the requests under way are done.
``ft_trained_prompts``  chat templates see the date of training, and control tokens inside content are plain text.
``ft_fair_turns``       tenants take turns in joining the batch, by the tokens that they received.

Configuration, all from the environment:

``FT_ADAPTER_INDEX``    file, or http(s) address, of the index: ``{name: {"directory", "manifest_sha256", "base_digest"}}``.
``FT_ADAPTER_ROOT``     where the adapters' directories are on this machine. Default: the directory that the index lies in.
``FT_BASE_DIGEST``      digest of the base model that this server runs, as the platform's catalogue states it.
``FT_BASE_ROWS``        ``1`` or ``0``: switch the repair of base rows on or off, whatever the hardware. Default: on where vLLM runs on CPU.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import hashlib
import itertools
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INDEX, ROOT, DIGEST, BASE_ROWS = "FT_ADAPTER_INDEX", "FT_ADAPTER_ROOT", "FT_BASE_DIGEST", "FT_BASE_ROWS"
NAME = re.compile(
    r"ft:[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?"  # the base model, as the catalogue spells ids
    r":[A-Za-z0-9][\w-]{0,127}:[\w-]{0,64}:[\w-]{1,64}"  # tenant, suffix, opaque part
    r"|adp-[0-9a-f]{12,64}",
    re.ASCII,
)
MAX_NAME = 400
"""Characters: longer ones are not looked up."""
SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}", re.ASCII)
"""One part of a path: no separator, and never a dot in front."""
SHA256 = re.compile(r"[0-9a-f]{64}")
MANIFEST, CONFIG, WEIGHTS = "manifest.json", "adapter_config.json", "adapter_model.safetensors"
MAX_INDEX_BYTES = 64 << 20
"""About 300,000 adapters."""
FETCH_TIMEOUT_S = 2.0
FETCHED_FOR_S = 1.0
"""An index behind an address is asked again after this time: a burst of unknown names is one request a second."""
DRAIN_S = 600.0
"""How long an unload waits for the requests that still use the adapter, before it frees the weights all the same."""


class Refused(Exception):
    """An adapter that must not be served; the message says why, for the server's log."""


@dataclass(kw_only=True)
class Index:
    """The adapters that may be served: a file that is replaced as a whole, or an address."""

    location: str
    _stamp: object = None
    _entries: Mapping[str, Any] = field(default_factory=dict)

    def find(self, name: str) -> Mapping[str, Any] | None:
        """The entry of `name`; None if it has none. ``Refused`` if the index cannot be read: what is not known is not served."""
        try:
            self._fetch() if self._remote else self._read()
        except (OSError, ValueError, urllib.error.URLError) as e:
            self._stamp, self._entries = None, {}
            raise Refused(f"the index {self.location} cannot be read: {type(e).__name__}: {e}") from e
        entry = self._entries.get(name)
        if entry is not None and not isinstance(entry, dict):
            raise Refused(f"its entry in the index is {type(entry).__name__}, not an object")
        return entry

    @property
    def _remote(self) -> bool:
        return self.location.startswith(("http://", "https://"))

    def _read(self) -> None:
        """A replaced file is another inode, or a later change of the same: only then is it read again."""
        stat = Path(self.location).stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if stamp != self._stamp:
            self._entries = _parsed(Path(self.location).read_bytes())
            self._stamp = stamp

    def _fetch(self) -> None:
        now = time.monotonic()
        if isinstance(self._stamp, float) and now - self._stamp < FETCHED_FOR_S:
            return
        with urllib.request.urlopen(self.location, timeout=FETCH_TIMEOUT_S) as answer:
            self._entries = _parsed(answer.read(MAX_INDEX_BYTES + 1))
        self._stamp = now


def _parsed(body: bytes) -> Mapping[str, Any]:
    if len(body) > MAX_INDEX_BYTES:
        raise ValueError(f"more than {MAX_INDEX_BYTES} bytes")
    entries = json.loads(body)
    if not isinstance(entries, dict):
        raise ValueError(f"it holds a {type(entries).__name__}, not an object")
    return entries


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Finds the directory of an adapter, and answers for its bytes."""

    index: Index
    root: Path
    base_digest: str

    def directory(self, name: str) -> Path | None:
        """Where the files of `name` are; None if it is no name of ours or not in the index.

        ``Refused`` where something about it is wrong:

        1. Its directory is one segment below the root, and no link.
        2. It was made for the base model that this server runs.
        3. Its manifest is the one that was registered, and was made for that base too.
        4. Every file is the one in the manifest, and there is no other.
        5. It is a LoRA adapter.
        """
        if len(name) > MAX_NAME or not NAME.fullmatch(name):
            return None
        entry = self.index.find(name)
        if entry is None:
            return None
        directory = self._below_root(str(entry.get("directory") or ""))
        self._same_base(str(entry.get("base_digest") or ""), "it was made for")
        manifest = _manifest(directory, str(entry.get("manifest_sha256") or ""))
        self._same_base(str(manifest.get("base_digest") or ""), "its manifest names")
        _check_files(directory, manifest)
        _check_lora(directory)
        return directory

    def _below_root(self, segment: str) -> Path:
        if not SEGMENT.fullmatch(segment):
            raise Refused(f"directory {segment[:80]!r} is not one segment below {self.root}")
        directory = self.root / segment
        if directory.is_symlink() or not directory.is_dir():
            raise Refused(f"{directory} is not a directory")
        return directory

    def _same_base(self, digest: str, what: str) -> None:
        if digest != self.base_digest:
            raise Refused(f"{what} base {digest[:19] or '(none)'}, this server runs {self.base_digest[:19]}")


def _manifest(directory: Path, sha256: str) -> Mapping[str, Any]:
    if not SHA256.fullmatch(sha256):
        raise Refused(f"the index has no sha256 of its manifest, but {sha256[:80]!r}")
    body = _bytes(directory / MANIFEST)
    actual = hashlib.sha256(body).hexdigest()
    if actual != sha256:
        raise Refused(f"{directory / MANIFEST} has sha256 {actual}, the index says {sha256}")
    manifest = json.loads(body)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise Refused(f"{directory / MANIFEST} lists no files")
    return manifest


def _check_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    listed: Mapping[str, Any] = manifest["files"]
    for name in (CONFIG, WEIGHTS):
        if name not in listed:
            raise Refused(f"{directory / MANIFEST} does not list {name}")
    unlisted = sorted({p.name for p in directory.iterdir()} - listed.keys() - {MANIFEST})
    if unlisted:
        raise Refused(f"{directory / unlisted[0]} is not in the manifest")
    for name, facts in sorted(listed.items()):
        if not SEGMENT.fullmatch(name):
            raise Refused(f"the manifest lists {name[:80]!r}, which is not the name of a file beside it")
        actual = _sha256(directory / name)
        if not isinstance(facts, dict) or actual != facts.get("sha256"):
            raise Refused(f"{directory / name} has sha256 {actual}, which is not the manifest's")


def _check_lora(directory: Path) -> None:
    config = json.loads(_bytes(directory / CONFIG))
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise Refused(f"its peft_type is {kind!r}, only LORA is served")


def _bytes(path: Path) -> bytes:
    """A link could lead to another tenant's bytes: only plain files are opened."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def configured(env: Mapping[str, str]) -> Registered | None:
    """From the environment; None without an index. ``ValueError`` stops the server at its start."""
    location = env.get(INDEX, "")
    if not location:
        return None
    index = Index(location=location)
    root = env.get(ROOT, "")
    if not root and index._remote:
        raise ValueError(f"{INDEX} is an address, so {ROOT} must say where the adapters' directories are on this machine")
    if not env.get(DIGEST):
        raise ValueError(f"{INDEX} is set, so {DIGEST} must be the digest of the base model that this server runs")
    return Registered(index=index, root=Path(root or Path(location).parent).absolute(), base_digest=env[DIGEST])


def serve_registered_adapters() -> None:
    """Register the resolver; vLLM asks it for each model name that it does not know."""
    registered = configured(os.environ)
    if registered is None:
        return
    from vllm.logger import init_logger
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    log, find = init_logger("vllm.ft"), registered.directory

    class FromIndex(LoRAResolver):  # type: ignore[misc]
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:  # noqa: ARG002 - the signature is vLLM's
            try:
                # In a thread: the weights are hashed, and requests of others go on meanwhile.
                directory = await asyncio.to_thread(find, lora_name)
            except (Refused, OSError, ValueError) as e:
                log.error("adapter %r is not served: %s", lora_name[:MAX_NAME], e)
                return None
            if directory is None:
                log.info("adapter %r is not served: it is not in the index", lora_name[:MAX_NAME])
                return None
            # The number is the server's to choose; it only has to be positive here.
            return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(directory))

    LoRAResolverRegistry.register_resolver("ft", FromIndex())


def keep_base_rows_apart() -> None:
    """Give rows without an adapter nothing from any: on CPU their index is -1, which picks the last slot's adapter.

    Wrong answers with status 200 otherwise, for every base request that shares a batch with an adapter's. GPU kernels skip such rows
    themselves and are left alone.
    """
    if not _wants_base_rows(os.environ.get(BASE_ROWS, "")):
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        repaired = without_base_rows(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):  # the second imported them by name
            setattr(module, name, repaired)


def _wants_base_rows(requested: str) -> bool:
    if requested:
        return requested == "1"
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def without_base_rows(operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation(inputs, weights, output, indices, ...)` with the inputs of negative indices set to zero; wrapping twice is once."""
    if getattr(operation, "ft_base_rows", False):
        return operation

    @functools.wraps(operation)
    def repaired(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        apart = inputs.masked_fill((indices < 0).unsqueeze(1), 0)
        return operation(apart, weights, output, indices.clamp(min=0), *rest, **named)

    repaired.ft_base_rows = True  # type: ignore[attr-defined]
    return repaired


def free_weights_on_unload() -> None:
    """Let an unload free the worker's copy too: by itself it forgets the name only, and the weights stay until others push them out."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.logger import init_logger

    log = init_logger("vllm.ft")
    forget = OpenAIServingModels.unload_lora_adapter
    if getattr(forget, "ft_frees", False):
        return
    under_way: set[asyncio.Task[None]] = set()

    async def free(server: Any, name: str, number: int) -> None:
        engine = server.engine_client
        deadline = time.monotonic() + DRAIN_S
        while _in_use(engine, number) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await engine.remove_lora(number)
        gone = number not in await engine.list_loras()
        log.info("adapter %r: its weights are %s", name[:MAX_NAME], "freed" if gone else "still held")

    @functools.wraps(forget)
    async def unload(server: Any, request: Any) -> Any:
        known = server.lora_requests.get(request.lora_name)
        answer = await forget(server, request)
        if known is not None and server.lora_requests.get(request.lora_name) is not known:
            task = asyncio.create_task(free(server, request.lora_name, known.lora_int_id))
            under_way.add(task)  # a task that nobody holds may be collected before its end
            task.add_done_callback(under_way.discard)
        return answer

    unload.ft_frees = True  # type: ignore[attr-defined]
    OpenAIServingModels.unload_lora_adapter = unload


def _in_use(engine: Any, number: int) -> bool:
    """Whether a request under way uses adapter `number`: freed under it, the worker would read the files again at its next token."""
    states = engine.output_processor.request_states.values()
    return any(state.lora_request is not None and state.lora_request.lora_int_id == number for state in states)


TENANT, WEIGHT = "x-ft-tenant", "x-ft-weight"
"""Headers in which the platform's gateway says whose request it is, and with which weight it shares the turns."""
OF_TENANT, OF_WEIGHT = "ft_tenant", "ft_weight"
"""Names under which they travel to the engine, in ``vllm_xargs``; what a caller writes there itself is overwritten."""

OWN_WAIT_S = 2.0
"""How long a tenant's request waits for an adapter of its own that runs: each change costs the answers of a batch."""


def take_turns() -> None:
    """Let waiting requests of all tenants join by :mod:`ft_fair_turns` instead of in the order of arrival.

    Without it, whoever has more requests open than the server has places (``--max-num-seqs``) makes everyone wait for the ends of answers.
    A server with another policy than ``fcfs`` keeps it.
    """
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.core.sched.request_queue import SchedulingPolicy
    from vllm.v1.core.sched.scheduler import Scheduler

    make, schedule = Scheduler.__init__, Scheduler.schedule
    if getattr(make, "ft_turns", False):
        return

    @functools.wraps(make)
    def made(scheduler: Any, *given: Any, **named: Any) -> None:
        make(scheduler, *given, **named)
        if scheduler.policy == SchedulingPolicy.FCFS:
            scheduler.waiting = TenantQueue(scheduler)

    @functools.wraps(schedule)
    def scheduled(scheduler: Any, *given: Any, **named: Any) -> Any:
        if isinstance(scheduler.waiting, TenantQueue):
            scheduler.waiting.begin_step()
        return schedule(scheduler, *given, **named)

    made.ft_turns = True  # type: ignore[attr-defined]
    Scheduler.__init__, Scheduler.schedule = made, scheduled
    OpenAIServingChat.create_chat_completion = with_tenant(OpenAIServingChat.create_chat_completion)
    OpenAIServingCompletion.create_completion = with_tenant(OpenAIServingCompletion.create_completion)


def with_tenant(answer: Callable[..., Any]) -> Callable[..., Any]:
    """`answer(serving, request, raw_request)`, whose request carries what the headers of `raw_request` say about its tenant."""

    @functools.wraps(answer)
    def with_headers(serving: Any, request: Any, raw_request: Any = None, *rest: Any, **named: Any) -> Any:
        headers = {} if raw_request is None else raw_request.headers
        weight = headers.get(WEIGHT, "")
        own = {OF_TENANT: headers.get(TENANT, ""), OF_WEIGHT: int(weight) if weight.isascii() and weight.isdigit() else 1}
        request.vllm_xargs = {**(request.vllm_xargs or {}), **own}
        return answer(serving, request, raw_request, *rest, **named)

    return with_headers


class TenantQueue:
    """Waiting requests of a ``vllm.v1.core.sched.scheduler.Scheduler``, in the place of its ``RequestQueue``.

    False while no waiting request may join:

    1. The last quarter of the places is left to tenants with no running request, and so is the last quarter of the adapters that may run
       at once (``--max-loras``).
    2. Where such a tenant, or a request after ``OWN_WAIT_S``, needs an adapter and none more may run, requests for one of the tenant that
       holds most of them, or received most, wait until its answers have ended. vLLM alone lets them go on for as long as they come.
    """

    def __init__(self, scheduler: Any) -> None:
        from ft_fair_turns import FairTurns

        self._scheduler = scheduler
        no_limit = sys.maxsize  # vLLM takes all that come; the platform's gateway has the limits
        self._turns = FairTurns[Any](
            max_rows=scheduler.max_num_active_reqs, max_join_tokens=no_limit, max_waiting=no_limit, max_waiting_each=no_limit
        )
        self._charged: dict[str, tuple[Any, int]] = {}
        """Answers that run while others wait, and how many of their tokens their tenants were charged for."""
        self._max_adapters = scheduler.lora_config.max_loras if scheduler.lora_config else 0
        self._adapters: dict[int, Any] = {}
        """Adapters that run, and for whom."""
        self._ending: set[int] = set()
        """Those of them that nothing more joins."""
        self._aside: list[Any] = []
        """Requests whose turn came in this step, and whose adapter could not run."""

    def begin_step(self) -> None:
        """Count what runs, and charge the tokens that came since the last step. While nothing waits, nobody is charged."""
        aside, self._aside = self._aside, []
        for request in reversed(aside):
            self._turns.put_back(request, _share_of(request), num_tokens=request.num_prompt_tokens, joined=False)
        if not len(self._turns):
            self._charged = {}
            return
        self._see()
        for request, num in self._charged.values():
            self._turns.charge(_share_of(request), request.num_output_tokens - num)
        self._charged = {each.request_id: (each, each.num_output_tokens) for each in self._scheduler.running}
        self._adapters = {number: _share_of(each) for each in self._scheduler.running if (number := _adapter_of(each))}
        self._ending = self._to_end()

    def add_request(self, request: Any) -> None:
        self._see()  # who has none running is new among the others
        self._turns.add(request, _share_of(request), num_tokens=request.num_prompt_tokens)

    def pop_request(self) -> Any:
        request = self._turns.pop()
        self._charged[request.request_id] = request, request.num_output_tokens
        if number := _adapter_of(request):
            self._adapters.setdefault(number, _share_of(request))
        return request

    def peek_request(self) -> Any:
        """Return the request that joins next; None while none may."""
        while (request := self._turns.peek()) is not None and self._lacks_adapter(request):
            self._aside.append(self._turns.pop(joins=False))
        return request

    def prepend_request(self, request: Any) -> None:
        """Take back a request that could not run, or that runs no longer."""
        self._turns.put_back(request, _share_of(request), num_tokens=request.num_prompt_tokens)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = {request.request_id for request in requests}
        self._turns.drop(lambda request: request.request_id in gone)
        self._aside = [request for request in self._aside if request.request_id not in gone]

    def __bool__(self) -> bool:
        return self.peek_request() is not None

    def __len__(self) -> int:
        return len(self._turns) + len(self._aside)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._aside, self._turns)

    def _see(self) -> None:
        self._turns.see(Counter(_share_of(request).tenant for request in self._scheduler.running))

    def _lacks_adapter(self, request: Any) -> bool:
        number = _adapter_of(request)
        if not number or number in self._adapters:
            return number in self._ending
        is_new = not any(_share_of(each).tenant == _share_of(request).tenant for each in self._scheduler.running)
        return self._max_adapters - len(self._adapters) <= (0 if is_new else self._max_adapters // 4)

    def _to_end(self) -> set[int]:
        """Return as many running adapters as are needed; those that are ending already come first."""
        num_free = self._max_adapters - len(self._adapters)
        if not self._max_adapters or num_free > self._max_adapters // 4:
            return set()
        running, now = {_share_of(request).tenant for request in self._scheduler.running}, time.time()
        needed = {
            _adapter_of(request)
            for request in self._turns
            if (not num_free and _share_of(request).tenant not in running) or now - request.arrival_time > OWN_WAIT_S
        } - {0, *self._adapters}  # fmt: skip
        held = Counter(share.tenant for share in self._adapters.values())

        def burden(number: int) -> tuple[bool, int, float]:
            share = self._adapters[number]
            return number in self._ending, held[share.tenant], self._turns.received(share)

        return set(sorted(self._adapters, key=burden, reverse=True)[: len(needed)])


def _adapter_of(request: Any) -> int:
    """Return the engine's number of a request's adapter; 0 for the base."""
    return int(request.lora_request.lora_int_id) if request.lora_request else 0


def _share_of(request: Any) -> Any:
    from ft_fair_turns import Share

    asked = (request.sampling_params and request.sampling_params.extra_args) or {}
    return Share(tenant=str(asked.get(OF_TENANT, "")), weight=max(1, int(asked.get(OF_WEIGHT, 1))))


TRAINED_DAY = (2024, 7, 26)
"""The date that templates see in training (``engine.data.tokens.templates.TODAY``)."""
PLACEHOLDERS = re.compile("[\U000f0000-\U000ffffd]")
"""Private-use characters that stand for control tokens until the template is rendered, as in training."""


class TrainedDay(dt.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> TrainedDay:
        return cls(*TRAINED_DAY, tzinfo=tz)


def render_as_trained() -> None:
    """Let ``strftime_now`` return the date of training, and keep control tokens inside content from becoming real ones."""
    import transformers.utils.chat_template_utils as templates
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import hf

    templates.datetime = TrainedDay
    apply = hf.safe_apply_chat_template
    if getattr(apply, "ft_trained", False):
        return

    @functools.wraps(apply)
    def rendered(model_config: Any, tokenizer: Any, conversation: Any, **given: Any) -> Any:
        conversation = [as_trained(message) for message in conversation]
        named = {name: given.get(name) for name in ("chat_template", "tools")}
        template = hf.resolve_chat_template(tokenizer, model_config=model_config, **named)
        if not isinstance(template, str) or not hasattr(tokenizer, "backend_tokenizer"):
            return apply(model_config, tokenizer, conversation, **given)
        escapes = _escapes(tokenizer, template)
        written = [conversation, given.get("tools")]
        if not escapes.pattern.search(json.dumps(written, ensure_ascii=False, default=str)):
            return apply(model_config, tokenizer, conversation, **given)
        try:
            marked, tools = escapes.mark(written)
            text = apply(model_config, tokenizer, marked, **{**given, "tools": tools, "tokenize": False})
            return escapes.ids(text, num_marks=len(PLACEHOLDERS.findall(json.dumps([marked, tools], ensure_ascii=False))))
        except ValueError as e:
            raise VLLMValidationError(f"control token in content: {e}", parameter="messages") from e

    rendered.ft_trained = True  # type: ignore[attr-defined]
    hf.safe_apply_chat_template = rendered


def as_trained(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the fields in training's order and under all names: vLLM sorts those of a call and knows one name of reasoning."""
    made = dict(message)
    if message.get("reasoning") is not None:
        made |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), message["reasoning"])
    if message.get("tool_calls"):
        made["tool_calls"] = [
            {**_first(call, "id", "type", "function"), "function": _first(call["function"], "name", "arguments")}
            for call in message["tool_calls"]
        ]
    return made


def _first(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**{name: fields[name] for name in names if name in fields}, **fields}


_known: dict[tuple[int, str], Escapes] = {}


def _escapes(tokenizer: Any, template: str) -> Escapes:
    key = (id(tokenizer), template)
    if key not in _known:
        _known.clear()  # a server has one tokenizer and one template
        _known[key] = Escapes(tokenizer.backend_tokenizer, template)
    return _known[key]


class Escapes:
    """Control tokens of one tokenizer and template, and how they are tokenized as plain text."""

    def __init__(self, backend: Any, template: str) -> None:
        added = list(backend.get_added_tokens_decoder().values())
        searched, written = _literals(template)
        control = [t.content for t in added if t.special or (t.content in written and t.content not in searched and t.content.strip())]
        self.pattern = _any_of(control)
        self._marks = {token: chr(0xF0000 + index) for index, token in enumerate(sorted(control))}
        self._tokens = {mark: token for token, mark in self._marks.items()}
        self._backend, self._cut = backend, _any_of([t.content for t in added])
        self._exact = '"ByteLevel"' in backend.pre_tokenizer.__getstate__().decode() and not any(t.lstrip or t.rstrip for t in added)

    def mark(self, value: Any) -> Any:
        """`value` with a placeholder for each control token; ``ValueError`` if it cannot be escaped."""
        if isinstance(value, str):
            if found := PLACEHOLDERS.search(value):
                raise ValueError(f"the content has U+{ord(found.group()):X} too, with which it would be escaped; remove one")
            return self.pattern.sub(lambda m: self._marks[m.group()], value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(inner) for key, inner in value.items()}
        return [self.mark(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def ids(self, text: str, *, num_marks: int) -> list[int]:
        """The token ids of a rendered text with placeholders: of their tokens' characters, not of the tokens."""
        if not self._exact or len(PLACEHOLDERS.findall(text)) < num_marks:
            raise ValueError("this model's tokenizer or chat template cannot take it as plain text; remove it")
        out: list[int] = []
        for index, part in enumerate(self._cut.split(text)):
            if index % 2:
                out.append(self._backend.token_to_id(part))
            elif PLACEHOLDERS.search(part):
                spelled = PLACEHOLDERS.sub(lambda m: self._tokens[m.group()], part)
                out += self._plain.encode(spelled, add_special_tokens=False).ids
            elif part:
                out += self._backend.encode(part, add_special_tokens=False).ids
        return out

    @functools.cached_property
    def _plain(self) -> Any:
        """The tokenizer without added tokens."""
        state = json.loads(self._backend.to_str())
        return type(self._backend).from_str(json.dumps({**state, "added_tokens": [], "post_processor": None, "truncation": None}))


def _any_of(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if tokens else "((?!))")


def _literals(template: str) -> tuple[set[str], str]:
    """Literals that a template searches for in contents, and all that it writes: only the latter are control tokens."""
    from jinja2 import nodes
    from transformers.utils import chat_template_utils as templates

    compiled = templates._compile_jinja_template(template)
    ast = compiled.environment.parse(template)
    readers = ast.find_all((nodes.Compare, nodes.Call))
    searched = {c.value for r in readers for c in r.find_all(nodes.Const) if isinstance(c.value, str)}
    data = [n.data for n in ast.find_all(nodes.TemplateData)]
    return searched, "\0".join(data + [n.value for n in ast.find_all(nodes.Const) if isinstance(n.value, str)])
