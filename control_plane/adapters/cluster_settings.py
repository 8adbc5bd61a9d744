"""The operator's settings for model servers on a cluster, from the file that ``FT_CLUSTER`` names."""

from __future__ import annotations

from dataclasses import fields

import yaml

from control_plane.platform.settings import Settings
from core.errors import InvalidRequest, Unavailable
from engine.adapters import ClusterSettings

FIELDS = frozenset(f.name for f in fields(ClusterSettings))


def cluster_settings(settings: Settings) -> ClusterSettings:
    """Return the operator's settings for model servers; ``Unavailable`` (``no_cluster``) without any."""
    file = settings.cluster_file
    if file is None:
        raise Unavailable(
            "this platform knows no cluster: set FT_CLUSTER to a YAML file with vllm_image and platform_image, each by its digest",
            code="no_cluster",
        )
    try:
        requested = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(requested, dict) or (unknown := sorted(map(str, requested.keys() - FIELDS))):
            raise ValueError(f"unknown field {unknown[0]!r}" if isinstance(requested, dict) else "it is not a mapping")
        given = {"object_store": settings.object_store, **requested}
        return ClusterSettings(**given | ({"callers": tuple(given["callers"])} if "callers" in given else {}))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as e:
        raise InvalidRequest(f"FT_CLUSTER {file}: {e}; fields are {', '.join(sorted(FIELDS))}", code="invalid_cluster") from e
