"""In-toto statements with SLSA provenance: which files, from which base model, data and code.

Formats: https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1. A statement has no time, so that it can be made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATEMENT, PROVENANCE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
TRAINED_BUILD, EXPORTED_BUILD = "urn:ft-platform:fine-tuning:v1", "urn:ft-platform:export:v1"
"""What made the files: a fine-tuning job, or an export of its result."""

Sha256ByName = Mapping[str, str]


def provenance(
    files: Sha256ByName,
    *,
    build_type: str,
    parameters: Mapping[str, Any],
    inputs: Sha256ByName,
    commit: str | None = None,
    builder: str,
    invocation: str,
) -> Mapping[str, Any]:
    """Returns the statement about `files`.

    `inputs`: what they were made from. `commit`: of the training code. `builder`: public URL of the platform. `invocation`: id of the job
    or export.
    """
    source = [] if commit is None else [{"name": "source", "digest": {"gitCommit": commit}}]
    return {
        "_type": STATEMENT,
        "subject": _digests(files),
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": build_type,
                "externalParameters": dict(parameters),
                "resolvedDependencies": [*_digests(inputs), *source],
            },
            "runDetails": {"builder": {"id": builder}, "metadata": {"invocationId": invocation}},
        },
    }


def statement_subjects(statement: Mapping[str, Any]) -> dict[str, str]:
    """Returns name and sha256 of each file that `statement` is about; ``ValueError`` if it is not such a statement."""
    if statement.get("_type") != STATEMENT or statement.get("predicateType") != PROVENANCE:
        raise ValueError(f"it is no {STATEMENT} with {PROVENANCE}")
    try:
        return {str(one["name"]): str(one["digest"]["sha256"]) for one in statement["subject"]}
    except (KeyError, TypeError) as e:
        raise ValueError(f"a subject has no {e}") from e


def _digests(files: Sha256ByName) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(files.items())]
