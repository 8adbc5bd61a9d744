"""API responses for models."""

from __future__ import annotations

from control_plane.models import schemas, service
from control_plane.platform.epoch_time import epoch_seconds

BASE_MODEL_FIELDS = ("license", "context_length", "num_parameters", "repo", "revision", "digest", "deprecated_since")


def model(found: service.Model) -> schemas.Model:
    return schemas.Model(
        id=found.id,
        created=epoch_seconds(found.created_at) or 0,
        owned_by=found.owned_by,
        type=found.type,
        base_model=found.base_model,
        stage=found.stage,
        adapter_id=found.adapter_id,
        **{name: getattr(found.base, name) for name in BASE_MODEL_FIELDS if found.base is not None},
    )
