"""The platform as a Dagster resource: what assets, sensors and ops are given."""

import contextlib
import time
from collections.abc import Iterator

import dagster as dg

from control_plane.protocols import Launcher
from control_plane.service import preparation
from control_plane.service.platform import Platform
from control_plane.settings import load
from ft_assets.errors import Fault, FtError, NotAdmitted
from resources.launcher import LocalLauncher
from resources.platform import open_platform

BEAT_S = 5.0


class PlatformResource(dg.ConfigurableResource[None]):
    """Opens the platform that the environment describes; all configuration is there, none in run config or the UI."""

    def get(self) -> Platform:
        return open_platform(load())

    def api_url(self) -> str:
        settings = load()
        return f"http://{settings.api_host}:{settings.api_port}"

    def launcher(self) -> Launcher:
        return LocalLauncher(load().work_dir / "launcher")


@contextlib.contextmanager
def owned_by(platform: Platform, tenant: str, job_id: str) -> Iterator[None]:
    """Give a failure of the wrapped work its owner.

    A user's error ends the job and the run; nothing is retried. A platform's error ends only the run: the job stays
    where it is and gets another run.
    """
    try:
        yield
    except FtError as error:
        if error.fault is Fault.USER:
            preparation.fail(platform, tenant, job_id, error)
        if error.fault is Fault.USER or isinstance(error, NotAdmitted):
            raise dg.Failure(description=error.message, metadata={"code": error.code}, allow_retries=False) from error
        raise


class Beat:
    """Progress callback that also records, at most every `BEAT_S`, that a step works on the job."""

    def __init__(self, platform: Platform, job_id: str) -> None:
        self._platform, self._job_id, self._next = platform, job_id, 0.0

    def __call__(self, *_: object) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_S
            preparation.beat(self._platform, self._job_id)
