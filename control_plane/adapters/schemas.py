"""Adapters, their lineage, approvals and exports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds, JsonObject
from control_plane.jobs.schemas import JobError


class Adapter(ApiModel):
    """A fine-tuned model in the registry: a LoRA adapter or a whole model, with its lineage and stage."""

    id: str
    """Id of the adapter, starting with `adp-`."""
    object: Literal["adapter"] = "adapter"
    """Object type, always `adapter`."""
    name: str
    """Model name to pass as `model` in requests, starting with `ft:`."""
    type: str
    """`lora_adapter`, or `full_model` if all parameters were fine-tuned."""
    stage: str
    """`draft` (passed, not served), `staging` (held or awaiting approval), `production` (served), `quarantined` (failed its evaluation),
    `deprecated` (withdrawn) or `archived` (files deleted)."""
    base_model: str
    """Id of the base model."""
    base_digest: str
    """SHA-256 digest of the base model it was trained on."""
    job_id: str
    """Id of the job that trained it."""
    dataset_id: str
    """Id of the dataset version it was trained on; of a mixture, the first one."""
    dataset_ids: list[str]
    """Ids of all dataset versions of a mixture; empty if it was trained on one alone."""
    pack_fingerprint: str
    """Fingerprint of the packed training data."""
    spec_sha256: str
    """SHA-256 of the frozen training spec."""
    lock_sha256: str
    """SHA-256 of the lock files of the software it was trained with, CUDA packages included."""
    commit: str
    """Commit of the training code."""
    metrics: JsonObject
    """Scores of its evaluation by name, such as `<suite>/<metric>`."""
    eval_passed: bool
    """Whether it passed its evaluation."""
    rank: int | None
    """LoRA rank; null for a whole model."""
    alpha: float | None
    """LoRA alpha, the scale of the update; null for a whole model."""
    modules: list[str]
    """Layers the LoRA weights apply to; empty for a whole model."""
    manifest_sha256: str
    """SHA-256 of the manifest, which lists its files with their hashes."""
    parent_adapter_id: str | None
    """Id of the adapter its training started from; null if none."""
    parent_checkpoint_id: str | None
    """Id of the checkpoint its training started from; null if none."""
    created_at: EpochSeconds
    """When it was registered, as Unix time in seconds."""
    promoted_at: EpochSeconds | None
    """When it was last promoted to production, as Unix time in seconds; null if never."""
    deprecated_at: EpochSeconds | None = None
    """When it was deprecated, as Unix time in seconds; null if it is not. Its files are deleted 30 days later."""
    archived_at: EpochSeconds | None = None
    """When it was archived, as Unix time in seconds; null if it is not. Its files are deleted; its record is kept."""
    approval: str = "none"
    """`none` (not needed), `pending`, `approved` or `rejected`."""
    approved_by: str | None = None
    """Id of the API key that approved or rejected it; null if undecided."""
    approved_at: EpochSeconds | None = None
    """When it was approved or rejected, as Unix time in seconds; null if undecided."""
    approval_note: str | None = None
    """Note kept with that decision; null if none."""
    released_by: str | None = None
    """Id of the key or member, or `operator:<id>`, who released it although it did not pass its evaluation; null if it was not released."""
    released_at: EpochSeconds | None = None
    """When it was released, as Unix time in seconds; null if it was not."""
    release_reason: str | None = None
    """Reason given for the release; null if it was not released."""
    desired: str
    """Whether inference servers should have it `loaded` or `unloaded`."""
    observed: str
    """What the inference servers report: `loaded`, `unloaded` or `failed`."""
    detail: str | None
    """Why `observed` differs from `desired`; null if it does not."""


class RolledBack(ApiModel):
    """Result of a rollback."""

    object: Literal["adapter.rollback"] = "adapter.rollback"
    """Object type, always `adapter.rollback`."""
    withdrawn: Adapter
    """The adapter that was withdrawn from production."""
    serving: Adapter
    """The adapter that is served in its place."""


class Lineage(ApiModel):
    """Origin of a model, traced from its name back to the uploaded files."""

    object: Literal["lineage"] = "lineage"
    """Object type, always `lineage`."""
    model: str
    """Name as requested."""
    kind: Literal["base_model", "route", "logical_name", "adapter"]
    """What the name refers to: `base_model`, `route` (all its targets), `logical_name` (the newest production adapter of that name) or
    `adapter`."""
    base_model: JsonObject | None = None
    """For a base model, its digest, repository and revision; null otherwise."""
    adapters: list[JsonObject]
    """The adapter, or one entry per target of a route: `adapter`, `files` with their SHA-256, `evaluations`, `job`, `training` (frozen
    spec, lock, commit, attempts, checkpoints), `base_model`, `pack`, `dataset`, `uploads`, `deletion` and `parents`."""
    holds: bool | None = None
    """With `verify`, whether all stored bytes match their recorded hashes; `links` of each adapter has the details. Null without
    `verify`."""


class Decide(ApiBody):
    """A person's decision about an adapter."""

    note: str | None = None
    """Note to keep with the decision."""


class Release(ApiBody):
    """Release of a model that did not pass its evaluation."""

    reason: str
    """Why it is good enough to be served: kept with the model and in the audit log."""


class Approve(Decide):
    """Approval of an adapter."""

    promote: bool = False
    """Whether to promote it to production immediately."""


class SigningKey(ApiModel):
    """A public key with which the platform signs, as a JSON Web Key (RFC 8037)."""

    kty: Literal["OKP"] = "OKP"
    """Key type, always `OKP`."""
    crv: Literal["Ed25519"] = "Ed25519"
    """Curve, always `Ed25519`."""
    x: str
    """The key, in base64url."""
    kid: str
    """Id of the key: its thumbprint by RFC 7638. Signatures name it as `keyid`."""
    use: Literal["sig"] = "sig"
    """Use, always `sig`."""
    alg: Literal["EdDSA"] = "EdDSA"
    """Algorithm, always `EdDSA`."""


class SigningKeySet(ApiModel):
    """The public keys that verify signatures of the platform."""

    keys: list[SigningKey]
    """The key that signs now, then those that it replaced, newest first. Revoked keys are left out."""


class EnvelopeSignature(ApiModel):
    """One signature of an envelope."""

    keyid: str
    """Id of the key that signed, which is the `kid` of a public key."""
    sig: str
    """The signature in base64, over the envelope's payload and its type."""


class Signature(ApiModel):
    """The signature of an adapter or export: a DSSE envelope with an in-toto statement about its manifest and files."""

    payload_type: str = Field(alias="payloadType")
    """Type of the payload, always `application/vnd.in-toto+json`."""
    payload: str
    """The statement in base64: the files with their SHA-256, and what they were made from (SLSA provenance)."""
    signatures: list[EnvelopeSignature]
    """Signatures over the payload; one."""


class CreateExport(ApiBody):
    """An export to create."""

    format: str
    """`adapter` (LoRA weights), `gguf_adapter` (LoRA weights for llama.cpp), `merged` (base and adapter in one), `gguf` (merged, for
    llama.cpp) or `tokenizer`."""
    precision: str | None = None
    """For `gguf`: `f32`, `f16` (default), `q8_0` or `q4_k_m`. For `merged`: `fp8`; the default keeps the precision of the base model.
    Not accepted for other formats."""


class Export(ApiModel):
    """An archive of an adapter's files in a format of your choice."""

    id: str
    """Id of the export, starting with `exp-`."""
    object: Literal["adapter.export"] = "adapter.export"
    """Object type, always `adapter.export`."""
    adapter_id: str
    """Id of the adapter that is exported."""
    format: str
    """`adapter`, `gguf_adapter`, `merged`, `gguf` or `tokenizer`."""
    precision: str | None
    """For `gguf`: `f32`, `f16`, `q8_0` or `q4_k_m`; for `merged`: `fp8`, or null for that of the base model; null for other formats."""
    status: str
    """`queued`, `running`, `ready` (can be downloaded) or `failed`."""
    progress: JsonObject | None
    """Progress of a running export: `stage`, and `seconds` so far. Null otherwise."""
    error: JobError | None
    """Why the export failed; null unless `status` is `failed`."""
    bytes: int | None
    """Size of the archive in bytes; null until it is ready."""
    sha256: str | None
    """SHA-256 of the archive; null until it is ready."""
    manifest: JsonObject | None
    """Lineage, files with their hashes, and proof that the exported weights produce the expected answers; null until it is ready."""
    content_url: str | None
    """Path to download the archive from; null until it is ready."""
    signature: Signature | None
    """The platform's signature over the archive's files: save it beside them as `manifest.intoto.json`. Null until the export is signed,
    within a minute after it is ready."""
    created_at: EpochSeconds
    """When the export was requested, as Unix time in seconds."""
    finished_at: EpochSeconds | None
    """When the export was ready or failed, as Unix time in seconds; null until then. It is deleted seven days later."""
