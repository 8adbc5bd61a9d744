# Written by `python -m tools.client` from asynchronous/resources/graders.py: change that, and run it again.
"""``client.graders`` and ``client.checkpoint_permissions``, as in OpenAI's fine-tuning API."""

from __future__ import annotations

from typing import Literal, Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
from control_plane.client.types import (
    CheckpointPermission,
    CreatePermissions,
    Deleted,
    GraderRun,
    PermissionList,
    RunGrader,
    ValidatedGrader,
    ValidateGrader,
)
from control_plane.client.wire import at, given


class Graders(Resource):
    """Graders, which reward answers."""

    def run(self, **body: Unpack[RunGrader]) -> GraderRun:
        """Grades ``model_sample``; errors caused by the item or sample are reported as flags of the result."""
        return self._api.call(GraderRun, "POST", at("/v1/fine_tuning/alpha/graders/run"), json=body, repeatable=True)

    def validate(self, **body: Unpack[ValidateGrader]) -> ValidatedGrader:
        """Validates a grader and returns it unchanged; raises an error if it cannot run."""
        return self._api.call(ValidatedGrader, "POST", at("/v1/fine_tuning/alpha/graders/validate"), json=body, repeatable=True)


class CheckpointPermissions(Resource):
    """Permissions on a checkpoint, which is named by its id or as ``JOB:step-N``."""

    def create(self, fine_tuned_model_checkpoint: str, **body: Unpack[CreatePermissions]) -> PermissionList:
        """Records that the tenant's own project may use a checkpoint; other projects are refused."""
        path = at(
            "/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions",
            fine_tuned_model_checkpoint=fine_tuned_model_checkpoint,
        )
        return self._api.call(PermissionList, "POST", path, json=body, repeatable=True)

    def list(
        self,
        fine_tuned_model_checkpoint: str,
        *,
        project_id: str | None = None,
        order: Literal["ascending", "descending"] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[CheckpointPermission]:
        """Lists the permissions on a checkpoint."""
        path = at(
            "/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions",
            fine_tuned_model_checkpoint=fine_tuned_model_checkpoint,
        )
        return self._api.pages(CheckpointPermission, path, given(project_id=project_id, order=order, limit=limit, after=after))

    def delete(self, fine_tuned_model_checkpoint: str, permission_id: str) -> Deleted:
        """Deletes the record of a permission."""
        path = at(
            "/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions/{permission_id}",
            fine_tuned_model_checkpoint=fine_tuned_model_checkpoint,
            permission_id=permission_id,
        )
        return self._api.call(Deleted, "DELETE", path)
