"""HTTP interface of the embedded server: OpenAI's endpoints for answers, vLLM's for adapters."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.http.disconnection import unless_disconnected
from control_plane.serving.gateway import TENANT, WEIGHT
from core.errors import InvalidRequest
from core.storable_text import check_storable, num_characters, printable
from engine.data import TEMPLATE_KWARGS, own_template_kwargs, read_request
from resources.inference import schemas
from resources.inference.answers import Call, Echo, complete_answer, events
from resources.inference.engine.engine_thread import UNNAMED, Engine
from resources.inference.engine.fair_turns import Share
from resources.inference.engine.grammar import Constraint, SchemaError
from resources.inference.loaded_adapters import AdapterError, AdapterStore
from resources.inference.request_errors import EngineError, RequestError, unknown_model
from resources.inference.schemas import ChatRequest, CompletionRequest, LoadRequest, UnloadRequest
from resources.inference.tool_requests import CallUse, call_use, invalid_parameters

COMPLETION_TOKENS = 16
"""Default limit of a text completion, as in OpenAI's API."""
MAX_WEIGHT = 1000
CLIENT_GONE = 499
"""Status of a request whose client has hung up, as nginx writes it in its log; no client gets it."""
MAX_SCORED = 1 << 15
"""Tokens of prompts that a request may have scored: with 20 others beside each, the answer has about 20 MB."""
CHARS_PER_TOKEN = 32
"""Characters that a request may have per token of the context. English text has 4 to 5; the rest leaves room for fields that a template
does not render, such as the reasoning of earlier turns."""


class Server:
    """State shared by the routes."""

    def __init__(
        self, engine: Engine, *, served_name: str, base_shapes: Mapping[str, Sequence[int]], max_resident: int, max_rank: int,
        base_digest: str | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.served_name, self.base_digest = engine, served_name, base_digest
        self.alias = f"{served_name}@sha256:{base_digest}" if base_digest else None
        self.store = AdapterStore(
            engine, base_name=served_name, base_shapes=base_shapes, max_resident=max_resident, max_rank=max_rank, base_digest=base_digest
        )
        self.created = int(time.time())
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="schemas")
        self._compiling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant: one schema of each waits for the compiler, so that a tenant with many new ones delays another by one of them."""
        self._rendering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant: the same for prompts, which all threads render and tokenize under one lock."""

    def models(self) -> Mapping[str, object]:
        """Return model cards like vLLM's. A field and a second served name announce the base's digest."""
        base = {**self._card(self.served_name, root=self.served_name, parent=None), "digest": self.base_digest}
        alias = [self._card(self.alias, root=self.served_name, parent=None)] if self.alias else []
        adapters = [self._card(a.name, root=str(a.directory), parent=self.served_name) for a in self.store.listing()]
        return {"object": "list", "data": [base, *alias, *adapters]}

    def _card(self, name: str, *, root: str, parent: str | None) -> Mapping[str, object]:
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "ft-platform", "root": root, "parent": parent,
            "max_model_len": self.engine.context_length,
        }  # fmt: skip

    async def call(self, body: ChatRequest | CompletionRequest, share: Share = UNNAMED) -> Call:
        """Check a request and render it to tokens; its answers take the turns of `share`."""
        base = body.model in (self.served_name, self.alias)
        if not base and body.model not in self.store:
            raise unknown_model(body.model)
        schema, turn = schemas.schema_of(body), self._rendering.setdefault(share.tenant, asyncio.Lock())
        async with turn:
            use = (
                await asyncio.to_thread(call_use, body, self.engine, served_name=self.served_name, content=schema)
                if isinstance(body, ChatRequest)
                else None
            )
            prompts = await asyncio.to_thread(self._render, body)
            wanted = tuple(self._max_tokens(body, len(prompt)) for prompt in prompts)
            echo = await asyncio.to_thread(self._echo, body, prompts)
        if body.num_top_logprobs is not None:
            await asyncio.to_thread(lambda: self.engine.grammars.tokens)  # analysed once, outside of the event loop
        constraint = None
        if use is not None:
            constraint = await self._call_constraint(use, share.tenant)
        elif schema is not None:
            constraint = await self._constraint(schema, share.tenant)
        return Call(
            model=body.model,
            adapter=None if base else body.model,
            prompts=tuple(prompts),
            n=body.n,
            max_tokens=wanted,
            sampling=body.sampling(vocabulary=self.engine.num_tokens, top_logprobs=body.num_top_logprobs),
            stops=body.stops,
            constraint=None if constraint is None else constraint.fresh,
            chat=isinstance(body, ChatRequest),
            calls=None if use is None else use.reading,
            echo=echo,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            share=share,
        )

    def _max_tokens(self, body: ChatRequest | CompletionRequest, num_tokens: int) -> int:
        """Return the most tokens of an answer to a prompt of so many; ``RequestError`` if both do not fit the context."""
        chat, space = isinstance(body, ChatRequest), self.engine.context_length - num_tokens
        wanted = body.max_completion_tokens if isinstance(body, ChatRequest) else None
        wanted = body.max_tokens if wanted is None else wanted
        if wanted is None:
            wanted = space if chat else min(COMPLETION_TOKENS, space)
        if wanted <= space and (space >= 1 or body.max_tokens == 0):
            return wanted
        limit = f"the maximum context length of {body.model} is {self.engine.context_length} tokens, the answer included"
        raise RequestError(
            f"The prompt has {num_tokens} tokens; {limit}. Shorten the prompt."
            if space < 1
            else f"The prompt has {num_tokens} tokens and max_tokens asks for {wanted} more; {limit}. Lower max_tokens to {space}, or "
            "shorten the prompt.",
            code="context_length_exceeded",
            param="messages" if chat else "prompt",
        )

    def _echo(self, body: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]) -> tuple[Echo, ...]:
        if not (isinstance(body, CompletionRequest) and body.echo):
            return ()
        scored, most = body.n * sum(map(len, prompts)), max(MAX_SCORED, self.engine.context_length)
        if body.logprobs is not None and scored > most:
            raise RequestError(
                f"echo with logprobs scores {scored} tokens, those of all prompts times n, and {most} is the limit; send several requests.",
                param="prompt",
            )
        texts = [given if isinstance(given, str) else self.engine.decode(given) for given in body.prompts]
        offsets = [() if body.logprobs is None else self.engine.text_offsets(given) for given in body.prompts]
        return tuple(Echo(text=text, offsets=starts) for text, starts in zip(texts, offsets, strict=True))

    def _render(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        self._refuse_long(body)
        if isinstance(body, CompletionRequest):
            return self._completion_prompts(body)
        asked = {**(body.model_extra or {}), "messages": body.messages, "tools": body.tools}
        if not self.engine.renders_tools and body.tool_choice is not None:  # none may be called, and the prompt cannot name them
            asked |= {TEMPLATE_KWARGS: own_template_kwargs(asked), "tools": None}
        check_storable(asked)
        return [self.engine.encode_chat(read_request(asked))]

    def _completion_prompts(self, body: CompletionRequest) -> list[list[int]]:
        found: list[list[int]] = []
        for at, prompt in enumerate(body.prompts):
            ids = (self.engine.encode_text(prompt) or self.engine.encode_text("\n")) if isinstance(prompt, str) else prompt
            if not ids or not all(0 <= token < self.engine.num_tokens for token in ids):
                what = f"tokens outside of 0..{self.engine.num_tokens - 1}" if ids else "no token"
                raise RequestError(f"prompt {at} has {what}; send the ids of {body.model}'s tokenizer.", param="prompt")
            found.append(ids)
        return found

    async def _constraint(self, schema: schemas.Schema, tenant: str) -> Constraint:
        try:
            return await self._compiled(schema, tenant)
        except SchemaError as e:
            raise schemas.invalid(str(e)) from e

    async def _compiled(self, rules: schemas.Schema | str, tenant: str) -> Constraint:
        """Return a constraint. New schemas are compiled one at a time in a separate thread, so other requests do not wait for them."""
        grammars = self.engine.grammars
        if (cached := grammars.cached(rules)) is not None:
            return cached
        turn = self._compiling.setdefault(tenant, asyncio.Lock())
        async with turn:
            if (cached := grammars.cached(rules)) is not None:  # by one that waited before this one
                return cached
            return await asyncio.get_running_loop().run_in_executor(self._compiler, grammars.constraint, rules)

    async def _call_constraint(self, use: CallUse, tenant: str) -> Constraint:
        tokens = await asyncio.to_thread(lambda: self.engine.grammars.tokens)
        try:
            return await self._compiled(use.grammar(tokens), tenant)
        except SchemaError as e:
            for function in use.tools.functions:  # find the one at fault
                try:
                    await self._compiled(function.parameters, tenant)
                except SchemaError as of_function:
                    raise invalid_parameters(str(of_function), function) from e
            if use.content is not None:
                await self._constraint(use.content, tenant)
            raise RequestError(f"tools: {e}.", code="invalid_function_parameters", param="tools") from e

    def _refuse_long(self, body: ChatRequest | CompletionRequest) -> None:
        """Refuse a request by its characters in all fields: rendering and tokenizing 3 MB takes a minute."""
        chat = isinstance(body, ChatRequest)
        texts = [body.messages, body.tools] if isinstance(body, ChatRequest) else [p for p in body.prompts if isinstance(p, str)]
        num_chars = max(map(num_characters, texts), default=0) if isinstance(body, CompletionRequest) else num_characters(texts)
        most = self.engine.context_length * CHARS_PER_TOKEN
        if num_chars > most:
            what = "messages" if chat else "prompt"
            raise RequestError(
                f"The {what} {'have' if chat else 'has'} {num_chars} characters, all fields counted: about {num_chars // 4} tokens at four "
                f"characters each. The maximum context length of {body.model} is {self.engine.context_length} tokens, the answer included, "
                f"in at most {most} characters. Shorten the {what}.",
                code="context_length_exceeded",
                param=what,
            )


async def _after(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


class TokenRequired:
    """Answers 401 to every request without the bearer token, including health and adapter endpoints."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        else:
            message = "Send the installation's token: Authorization: Bearer <FT_INFERENCE_TOKEN>."
            refusal = _error(401, message, kind="invalid_request_error", code="invalid_token")
            await refusal(scope, receive, send)


def create_app(server: Server, *, token: str) -> FastAPI:
    """Create the server's application, for callers that send `token`."""
    app = FastAPI(title="ft-platform inference", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TokenRequired, token=token)
    _add_errors(app)
    _add_answers(app, server)
    _add_admin(app, server)
    return app


def _add_answers(app: FastAPI, server: Server) -> None:
    async def answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
        return await unless_disconnected(request, begin(body, _share(request)))

    async def begin(body: ChatRequest | CompletionRequest, share: Share) -> Response:
        call = await server.call(body, share)
        if body.stream:
            stream = events(server.engine, server.store, call)
            first = await anext(stream)  # errors up to here are reported with their own status
            return StreamingResponse(_after(first, stream), media_type="text/event-stream")
        return JSONResponse(await complete_answer(server.engine, server.store, call))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)


def _share(request: Request) -> Share:
    """Return the tenant and weight that the gateway names; the token vouches for both."""
    weight = request.headers.get(WEIGHT, "")
    return Share(
        tenant=request.headers.get(TENANT, ""), weight=float(weight) if weight.isascii() and weight.isdigit() and int(weight) else 1.0
    )


def _add_admin(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def models() -> Mapping[str, object]:
        return server.models()

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if server.engine.alive else 503)

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadRequest) -> Response:
        if not body.lora_name or not body.lora_path:
            raise AdapterError("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if body.load_inplace:
            raise AdapterError("'load_inplace' is not supported: a name is never reused for other weights.", kind="InvalidUserInput")
        await server.store.load(body.lora_name, Path(body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadRequest) -> Response:
        if not body.lora_name:
            raise AdapterError("'lora_name' needs to be provided to unload a LoRA adapter.", kind="InvalidUserInput")
        if body.lora_name not in server.store:
            raise AdapterError(f"The lora adapter '{body.lora_name}' cannot be found.", kind="NotFoundError", status=404)
        await server.store.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_request: Request, e: RequestError) -> Response:
        return _error(e.status, e.message, kind="invalid_request_error", code=e.code, param=e.param)

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _e: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(InvalidRequest)
    async def unreadable(_request: Request, e: InvalidRequest) -> Response:
        return _error(400, e.message, kind="invalid_request_error", code=e.code, param=e.param)

    @app.exception_handler(HTTPException)
    async def without_route(_request: Request, e: HTTPException) -> Response:
        """FastAPI's own refusals: no such route, or a body that Python's parser cannot take."""
        return _error(e.status_code, f"{e.detail}.", kind="invalid_request_error", code="invalid_request")

    @app.exception_handler(AdapterError)
    async def adapter_refused(_request: Request, e: AdapterError) -> Response:
        return _error(e.status, e.message, kind=e.kind, code=e.status)

    @app.exception_handler(EngineError)
    async def failed(_request: Request, e: EngineError) -> Response:
        return _error(500, str(e), kind="server_error", code="engine_failed")

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, e: RequestValidationError) -> Response:
        first = e.errors()[0]
        if first["type"] == "json_invalid":
            why = f"The body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}."
            return _error(400, why, kind="invalid_request_error", code="invalid_json")
        where = ".".join(str(part)[:80] for part in first["loc"][1:])
        return _error(400, f"{where or 'body'}: {first['msg']}.", kind="invalid_request_error", code="invalid_request", param=where or None)


def _error(status: int, message: str, *, kind: str, code: str | int, param: str | None = None) -> Response:
    """Return OpenAI's form of an error; message and param may quote characters that JSON cannot hold."""
    param = None if param is None else printable(param)
    return JSONResponse({"error": {"message": printable(message), "type": kind, "param": param, "code": code}}, status_code=status)
