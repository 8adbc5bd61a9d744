"""``client.graders`` and ``client.checkpoint_permissions``, as in OpenAI's fine-tuning API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import CheckpointPermission, Deleted, GraderRun, PermissionList, ValidatedGrader
from ft_client.wire import at, given


class Graders(Resource):
    """Graders, which give an answer its reward."""

    def run(self, *, grader: Mapping[str, Any], model_sample: str, **options: Any) -> GraderRun:
        """Grades ``model_sample``; errors with this item and sample are flags of the result.

        Options: `item`.
        """
        return self._api.call(
            "POST",
            at("/v1/fine_tuning/alpha/graders/run"),
            json={"grader": grader, "model_sample": model_sample, **options},
            repeatable=True,
        )

    def validate(self, *, grader: Mapping[str, Any]) -> ValidatedGrader:
        """Validates a grader; returns it unchanged."""
        return self._api.call("POST", at("/v1/fine_tuning/alpha/graders/validate"), json={"grader": grader}, repeatable=True)


class CheckpointPermissions(Resource):
    """Projects that may use a checkpoint, which is named by its id or as ``JOB:step-N``."""

    def create(self, fine_tuned_model_checkpoint: str, *, project_ids: Sequence[str]) -> PermissionList:
        """Records that your own project may use a checkpoint; another project is refused."""
        path = at("/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions", fine_tuned_model_checkpoint)
        return self._api.call("POST", path, json={"project_ids": project_ids}, repeatable=True)

    def list(
        self,
        fine_tuned_model_checkpoint: str,
        *,
        project_id: str | None = None,
        order: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[CheckpointPermission]:
        """Lists permissions on a checkpoint."""
        path = at("/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions", fine_tuned_model_checkpoint)
        return self._api.pages(path, given(project_id=project_id, order=order, limit=limit, after=after))

    def delete(self, fine_tuned_model_checkpoint: str, permission_id: str) -> Deleted:
        """Deletes a permission."""
        path = at(
            "/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint}/permissions/{permission_id}",
            fine_tuned_model_checkpoint,
            permission_id,
        )
        return self._api.call("DELETE", path)
