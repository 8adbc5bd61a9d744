"""The output of Dagster's steps and sensors, as objects of the platform's store.

    tenants/<t>/dagster/<run>/compute_logs/<step>.{out,err}   of a tenant's runs: with its key, its export and its erasure
    dagster/...                                               of everything else, by the same names

While a step runs, its output is in files of the machine it runs on, and every half minute in objects that end in ``.partial``. Afterwards
only the objects are left; what they hold is never written to a file again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import IO, Any, Self

from dagster import DagsterInstance, Field, Noneable

from control_plane.platform import settings as settings_module
from control_plane.platform.protocols import ObjectStore
from core import layout
from core.errors import NotFound
from resources import object_store
from resources.dagster.private_api import (
    IO_TYPE_EXTENSION,
    ComputeIOType,
    ConfigurableClass,
    ConfigurableClassData,
    LocalComputeLogManager,
    PollingComputeLogSubscriptionManager,
    TruncatingCloudStorageComputeLogManager,
)
from resources.dagster.run_tags import TENANT_TAG

RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_KNOWN = 10_000


class StepLogs(TruncatingCloudStorageComputeLogManager[DagsterInstance], ConfigurableClass):  # type: ignore[misc]
    """The section ``compute_logs`` of ``dagster.yaml``; output that is being written is below ``FT_HOME``."""

    def __init__(self, *, upload_interval: int | None = None, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._settings = settings_module.load()
        self._local = LocalComputeLogManager(str(self._settings.home / "dagster" / "storage"))
        self._upload_interval, self._inst_data = upload_interval, inst_data
        self._subscriptions = PollingComputeLogSubscriptionManager(self)  # type: ignore[no-untyped-call]
        self._tenants: dict[str, str | None] = {}

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {"upload_interval": Field(Noneable(int), is_required=False, default_value=None)}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        return cls(inst_data=inst_data, **config_value)

    @property
    def local_manager(self) -> LocalComputeLogManager:
        return self._local

    @property
    def upload_interval(self) -> int | None:
        return self._upload_interval

    @cached_property
    def objects(self) -> ObjectStore:
        return object_store.of_settings(self._settings)

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield key and text of everything that belongs to no tenant: it may name one all the same."""
        for info in self.objects.list(layout.STEP_LOGS):
            try:
                yield info.key, self.objects.get_bytes(info.key).decode(errors="replace")
            except NotFound:  # deleted meanwhile
                continue

    def delete_logs(self, log_key: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
        self._local.delete_logs(log_key=log_key, prefix=prefix)
        if log_key:
            keys = [self._key(log_key, io_type, partial=partial) for io_type in IO_TYPE_EXTENSION for partial in (False, True)]
        else:
            keys = [info.key for info in self.objects.list(self._prefix(prefix or ()))]
        for key in keys:
            self.objects.delete(key)

    def download_url_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str | None:
        """Return a link to the whole output, where the store has links; the page shows the text itself."""
        if not self.cloud_storage_has_logs(log_key, io_type):
            return None
        url = self.objects.read_url(self._key(log_key, io_type))
        return url if url.startswith("http") else None

    def display_path_for_type(self, log_key: Sequence[str], io_type: ComputeIOType) -> str:
        return self.objects.uri(self._key(log_key, io_type))

    def cloud_storage_has_logs(self, log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False) -> bool:
        return self.objects.exists(self._key(log_key, io_type, partial=partial))

    def get_log_data_for_type(
        self, log_key: Sequence[str], io_type: ComputeIOType, offset: int, max_bytes: int | None
    ) -> tuple[bytes | None, int]:
        if self.has_local_file(log_key, io_type):
            path = self._local.get_captured_local_path(log_key, IO_TYPE_EXTENSION[io_type])
            found: tuple[bytes | None, int] = self._local.read_path(path, offset=offset, max_bytes=max_bytes)
            return found
        for partial in (False, True):
            try:
                with self.objects.open(self._key(log_key, io_type, partial=partial)) as stored:
                    stored.read(offset)
                    data = stored.read(-1 if max_bytes is None else max_bytes)
            except NotFound:
                continue
            return data, offset + len(data)
        return None, offset

    def get_log_keys_for_log_key_prefix(self, log_key_prefix: Sequence[str], io_type: ComputeIOType) -> list[list[str]]:
        below, ending = f"{self._prefix(log_key_prefix)}/", f".{IO_TYPE_EXTENSION[io_type]}"
        names = [info.key.removeprefix(below) for info in self.objects.list(below.rstrip("/"))]
        return [[*log_key_prefix, name.removesuffix(ending)] for name in names if name.endswith(ending) and "/" not in name]

    def on_subscribe(self, subscription: Any) -> None:
        self._subscriptions.add_subscription(subscription)

    def on_unsubscribe(self, subscription: Any) -> None:
        self._subscriptions.remove_subscription(subscription)

    def dispose(self) -> None:
        self._subscriptions.dispose()
        self._local.dispose()

    def _upload_file_obj(self, data: IO[bytes], log_key: Sequence[str], io_type: ComputeIOType, partial: bool = False) -> None:
        is_step = RUN.fullmatch(log_key[0]) is not None  # its objects mark its end, so they are stored even if empty
        if data.read(1) or (is_step and not partial):
            data.seek(0)
            self.objects.put_stream(self._key(log_key, io_type, partial=partial), data)  # type: ignore[arg-type]
        if not partial and self._upload_interval:
            self.objects.delete(self._key(log_key, io_type, partial=True))

    def _key(self, log_key: Sequence[str], io_type: ComputeIOType, *, partial: bool = False) -> str:
        return f"{self._prefix(log_key)}.{IO_TYPE_EXTENSION[io_type]}{'.partial' if partial else ''}"

    def _prefix(self, names: Sequence[str]) -> str:
        tenant = self._tenant(names[0]) if RUN.fullmatch(names[0]) else None
        return "/".join([layout.step_logs_prefix(tenant), *names])

    def _tenant(self, run_id: str) -> str | None:
        if run_id not in self._tenants:
            run = self._instance.get_run_by_id(run_id)
            if run is None:
                return None
            if len(self._tenants) >= MAX_KNOWN:
                self._tenants.clear()
            self._tenants[run_id] = run.tags.get(TENANT_TAG)
        return self._tenants[run_id]
