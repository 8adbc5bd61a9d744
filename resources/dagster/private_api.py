"""Everything that this project uses of Dagster's private modules; a test forbids importing them elsewhere.

Custom launchers, coordinators and storages need these names, which Dagster does not export. Another version of Dagster may lack one: then
this import fails at once, here, and names it.
"""

from dagster import __version__

TRIED_WITH = "1.13"
"""Minor version of Dagster whose private modules were tried."""

try:
    from dagster._cli.api import _execute_run_command_body as execute_run
    from dagster._core.code_pointer import ModuleCodePointer
    from dagster._core.definitions.reconstruct import ReconstructableRepository
    from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, WorkerStatus
    from dagster._core.run_coordinator.queued_run_coordinator import RunQueueConfig
    from dagster._core.storage.cloud_storage_compute_log_manager import (
        PollingComputeLogSubscriptionManager,
        TruncatingCloudStorageComputeLogManager,
    )
    from dagster._core.storage.compute_log_manager import ComputeIOType
    from dagster._core.storage.local_compute_log_manager import IO_TYPE_EXTENSION, LocalComputeLogManager
    from dagster._core.storage.tags import GRPC_INFO_TAG, PARENT_RUN_ID_TAG
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster._serdes import ConfigurableClass, ConfigurableClassData
    from dagster._utils.interrupts import capture_interrupts
except ImportError as error:
    raise ImportError(
        f"Dagster {__version__} has changed what the run launcher, the run queue and the storage build on ({error}); "
        f"install the version in requirements.lock (tried with {TRIED_WITH})"
    ) from error

__all__ = [
    "GRPC_INFO_TAG",
    "IO_TYPE_EXTENSION",
    "PARENT_RUN_ID_TAG",
    "CheckRunHealthResult",
    "ComputeIOType",
    "ConfigurableClass",
    "ConfigurableClassData",
    "LaunchRunContext",
    "LocalComputeLogManager",
    "ModuleCodePointer",
    "PollingComputeLogSubscriptionManager",
    "ReconstructableRepository",
    "RunQueueConfig",
    "TruncatingCloudStorageComputeLogManager",
    "WorkerStatus",
    "WorkspaceFileTarget",
    "WorkspaceProcessContext",
    "capture_interrupts",
    "execute_run",
]
