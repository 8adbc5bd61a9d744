"""HTTP client of the inference fleet, which uses vLLM's load and unload endpoints on each replica.

Errors are classified by whether a retry can help: no connection, a timeout, 408, 425, 429, 502, 503 and 504 are ``Unavailable``; all other
refusals are permanent (``Conflict``). vLLM answers permanent refusals (rank, DoRA, ...) with a plain 500, so a 500 of an engine that is
still healthy counts as permanent, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from control_plane.platform.protocols import Replica
from core.errors import Conflict, FtError, Unavailable

TRANSIENT = frozenset({408, 425, 429, 502, 503, 504})
TIMEOUT = httpx.Timeout(10.0, connect=2.0)
"""A load reads a few hundred MB at most, and continues after a timeout; a replica that does not accept within 2 s is down."""
LISTING_TIMEOUT = httpx.Timeout(3.0, connect=1.0)
"""Limits how long a hung replica delays a round."""
SILENT_S = 15.0
"""Time after its last listing for which a replica's state stays valid: an overloaded one may not list, yet answer requests."""
DIGEST_MARK = "@sha256:"
"""A server announces its base's digest by a second served name, ``<base>@sha256:<digest>`` (vLLM: ``--served-model-name``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeMount:
    """A volume at two paths: `here` for the platform, `there` for the servers. Other paths are the same on both sides."""

    here: PurePosixPath
    there: PurePosixPath

    def to_server(self, path: str) -> str:
        return _translate(path, self.here, self.there)

    def from_server(self, path: str) -> str:
        return _translate(path, self.there, self.here)


def _translate(path: str, old: PurePosixPath, new: PurePosixPath) -> str:
    found = PurePosixPath(path)
    return str(new / found.relative_to(old)) if found.is_relative_to(old) else path


SAME_PATHS = VolumeMount(here=PurePosixPath("/"), there=PurePosixPath("/"))


class HttpFleet:
    """Replicas by URL. Thread-safe. Callers use the platform's paths; `volume` translates them to the servers' paths.

    Every request carries `token` as its bearer token.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str,
        volume: VolumeMount = SAME_PATHS,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._volume = volume
        # trust_env=False: no proxy from the environment between the platform and its servers.
        self._new_client = partial(
            httpx.Client, timeout=TIMEOUT, transport=transport, trust_env=False, headers={"authorization": f"Bearer {token}"}
        )
        self._urls = list(dict.fromkeys(u.rstrip("/") for u in urls))
        self._clients: dict[str, httpx.Client] = {}
        self._adding = threading.Lock()
        self._clock = clock
        self._bases: dict[str, str] = {}
        self._listed_at: dict[str, float] = {}
        """Time of each replica's last listing; at first, of its client's creation."""
        for url in self._urls:
            self._client(url)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def replicas(self, also: Sequence[str] = ()) -> Sequence[Replica]:
        urls = list(dict.fromkeys([*self._urls, *also]))
        if len(urls) <= 1:
            return [self._describe(url) for url in urls]
        with ThreadPoolExecutor(len(urls), thread_name_prefix="replicas") as pool:
            return list(pool.map(self._describe, urls))

    def load(self, url: str, name: str, directory: Path) -> None:
        client, path = self._client(url), self._volume.to_server(str(directory))
        answer = _send(client, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if answer.status_code == 400 and "already been loaded" in answer.text:  # perhaps by another process in the meantime
            where = _cards(client).adapters.get(name)
            if where == path:
                return
            if where is not None:
                raise Conflict(
                    f"{url} already serves {name} from {where}; unload it before loading it from another directory", code="served_elsewhere"
                )
        _check(client, answer, f"load {name}")

    def unload(self, url: str, name: str) -> None:
        answer = _send(self._client(url), "POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status_code != 404:
            _check(self._client(url), answer, f"unload {name}")

    def probe(self, url: str, name: str) -> float:
        body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}  # a text: the base may have no chat template
        started = time.monotonic()
        _check(self._client(url), _send(self._client(url), "POST", "/v1/completions", body), f"probe {name}")
        return time.monotonic() - started

    def loads_adapters(self, url: str) -> bool:
        """Whether a replica has the endpoints that load adapters. Without them, vLLM does not look unknown names up either."""
        answer = _send(self._client(url), "GET", "/v1/load_lora_adapter", None, timeout=LISTING_TIMEOUT)
        return answer.status_code == httpx.codes.METHOD_NOT_ALLOWED

    def _client(self, url: str) -> httpx.Client:
        with self._adding:
            if url not in self._clients:
                self._clients[url], self._listed_at[url] = self._new_client(base_url=url), self._clock()
            return self._clients[url]

    def _describe(self, url: str) -> Replica:
        try:
            found = _cards(self._client(url))
        except FtError as e:
            gone = isinstance(e, Conflict) or isinstance(e.__cause__, httpx.ConnectError)
            silent = not gone and self._clock() - self._listed_at[url] < SILENT_S
            return Replica(url=url, ready=False, base=self._bases.get(url), error=e.message, silent=silent)
        self._listed_at[url] = self._clock()
        if found.base is not None:
            self._bases[url] = found.base
        return replace(found, adapters={name: self._volume.from_server(path) for name, path in found.adapters.items()})


def _cards(client: httpx.Client) -> Replica:
    answer = _send(client, "GET", "/v1/models", None, timeout=LISTING_TIMEOUT)
    _check(client, answer, "list models")
    url = _url(client)
    try:
        return _read_cards(url, answer.json()["data"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Conflict(f"{url} does not answer /v1/models as an inference server does ({e!r})", code="adapter_refused") from e


def _read_cards(url: str, cards: Sequence[Mapping[str, Any]]) -> Replica:
    adapters = {str(c["id"]): str(c["root"]) for c in cards if c.get("parent")}
    roots = [c for c in cards if not c.get("parent")]
    plain = next((c for c in roots if DIGEST_MARK not in c["id"]), None)
    announced = (str(c["id"]).partition(DIGEST_MARK)[2] for c in roots if plain and c["id"].startswith(f"{plain['id']}{DIGEST_MARK}"))
    digest = (plain or {}).get("digest") or next(announced, None)
    return Replica(url=url, ready=plain is not None, base=plain["id"] if plain else None, base_digest=digest, adapters=adapters)


def _url(client: httpx.Client) -> str:
    return str(client.base_url).rstrip("/")


def _send(
    client: httpx.Client, method: str, path: str, body: Mapping[str, object] | None, *, timeout: httpx.Timeout = TIMEOUT
) -> httpx.Response:  # fmt: skip
    try:
        return client.request(method, path, json=body, timeout=timeout)
    except httpx.HTTPError as e:
        raise Unavailable(f"inference server {_url(client)} did not answer {path}: {type(e).__name__}; is it running?") from e


def _check(client: httpx.Client, answer: httpx.Response, what: str) -> None:
    if answer.is_success:
        return
    message = f"inference server {_url(client)} refused to {what}: {answer.status_code} {_message(answer)}"
    if answer.status_code in TRANSIENT or (answer.status_code == 500 and not _healthy(client)):
        raise Unavailable(message)
    raise Conflict(message, code="adapter_refused")


def _healthy(client: httpx.Client) -> bool:
    try:
        return _send(client, "GET", "/health", None, timeout=LISTING_TIMEOUT).is_success
    except FtError:
        return False


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
