"""Whoever changes a downloaded file, its manifest or its signature, or signs with another key, is refused by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from core.durable_files import sha256_of
from core.errors import InvalidRequest
from engine.adapters import package
from engine.adapters.signatures import dsse, public_keys, signed_folder, statements
from engine.adapters.signatures.signed_folder import ENVELOPE_FILE

KEY, OTHER = Ed25519PrivateKey.from_private_bytes(b"\1" * 32), Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
KEYS = {public_keys.key_id(KEY.public_key()): KEY.public_key()}


def statement_of(folder: Path) -> dict[str, object]:
    return dict(
        statements.provenance(
            {path.name: sha256_of(path) for path in folder.iterdir() if path.name != ENVELOPE_FILE},
            build_type=statements.EXPORTED_BUILD, parameters={"model": "ft:m:t:s:1"}, inputs={"base_model:m": "b" * 64}, commit="c" * 40,
            builder="https://ft.example.com", invocation="exp-1",
        )
    )  # fmt: skip


def sign(folder: Path, key: Ed25519PrivateKey = KEY) -> None:
    (folder / ENVELOPE_FILE).write_text(json.dumps(dsse.sign_statement(statement_of(folder), key)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A signed export."""
    made = tmp_path / "export"
    made.mkdir()
    (made / package.ADAPTER_WEIGHTS).write_bytes(b"weights")
    (made / package.ADAPTER_CONFIG).write_text("{}")
    package.write_manifest(made, served_name="m", base_digest="b" * 64)
    sign(made)
    return made


def forge(folder: Path) -> None:
    """Signed with another key that calls itself by the id of the known one."""
    sign(folder, OTHER)
    envelope = json.loads((folder / ENVELOPE_FILE).read_text())
    envelope["signatures"][0]["keyid"] = next(iter(KEYS))
    (folder / ENVELOPE_FILE).write_text(json.dumps(envelope))


def restate(folder: Path) -> None:
    """Weights and statement changed together, under the old signature."""
    (folder / package.ADAPTER_WEIGHTS).write_bytes(b"others")
    envelope = json.loads((folder / ENVELOPE_FILE).read_text())
    envelope["payload"] = base64.b64encode(json.dumps(statement_of(folder)).encode()).decode()
    (folder / ENVELOPE_FILE).write_text(json.dumps(envelope))


def link(folder: Path) -> None:
    (folder / package.ADAPTER_WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / package.ADAPTER_WEIGHTS).symlink_to(folder.parent / "elsewhere")


def link_envelope(folder: Path) -> None:
    (folder / ENVELOPE_FILE).rename(folder.parent / "elsewhere")
    (folder / ENVELOPE_FILE).symlink_to(folder.parent / "elsewhere")


def rewrite(**fields: object) -> Callable[[Path], object]:
    return lambda folder: (folder / ENVELOPE_FILE).write_text(json.dumps(json.loads((folder / ENVELOPE_FILE).read_text()) | fields))


def state_twice(folder: Path) -> None:
    text = (folder / ENVELOPE_FILE).read_text()
    (folder / ENVELOPE_FILE).write_text('{"payload": "e30=", ' + text.lstrip()[1:])


def blot(folder: Path, part: str) -> None:
    """Characters that no base64 has, which lenient readers skip."""
    envelope = json.loads((folder / ENVELOPE_FILE).read_text())
    within = envelope["signatures"][0] if part == "sig" else envelope
    within[part] = f"!?{within[part]}"
    (folder / ENVELOPE_FILE).write_text(json.dumps(envelope))


def signed_over(folder: Path, signed_bytes: Callable[[bytes], bytes]) -> None:
    """Signed by our key, over other bytes than those of an envelope of this type."""
    envelope = json.loads((folder / ENVELOPE_FILE).read_text())
    made = KEY.sign(signed_bytes(base64.b64decode(envelope["payload"])))
    envelope["signatures"][0]["sig"] = base64.b64encode(made).decode()
    (folder / ENVELOPE_FILE).write_text(json.dumps(envelope))


def sign_more(*more: tuple[str, bytes], first: bool = False) -> Callable[[Path], object]:
    """Further signatures: the id of the key that each claims, and its bytes."""
    added = [{"keyid": signer, "sig": base64.b64encode(sig).decode()} for signer, sig in more]

    def change(folder: Path) -> None:
        envelope = json.loads((folder / ENVELOPE_FILE).read_text())
        envelope["signatures"] = [*added, *envelope["signatures"]] if first else [*envelope["signatures"], *added]
        (folder / ENVELOPE_FILE).write_text(json.dumps(envelope))

    return change


OWN_ID, OTHER_ID = next(iter(KEYS)), public_keys.key_id(OTHER.public_key())
CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a byte of the weights": (lambda f: (f / package.ADAPTER_WEIGHTS).write_bytes(b"weightz"), "file_changed", package.ADAPTER_WEIGHTS),
    "a manifest": (lambda f: (f / package.PACKAGE_MANIFEST).write_text("{}"), "manifest_changed", package.PACKAGE_MANIFEST),
    "another key": (lambda f: sign(f, OTHER), "signing_key_unknown", public_keys.key_id(OTHER.public_key())),
    "another key under the id of ours": (forge, "signature_invalid", next(iter(KEYS))),
    "another statement": (restate, "signature_invalid", next(iter(KEYS))),
    "a file more": (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "file_added", "pytorch_model.bin"),
    "a file less": (lambda f: (f / package.ADAPTER_CONFIG).unlink(), "file_missing", package.ADAPTER_CONFIG),
    "a link in place of a file": (link, "file_missing", package.ADAPTER_WEIGHTS),
    "a link more": (lambda f: (f / "also").symlink_to(f / package.ADAPTER_CONFIG), "file_added", "also"),
    "a link to the signature more": (lambda f: (f / "also").symlink_to(f / ENVELOPE_FILE), "file_added", "also"),
    "a link in place of the signature": (link_envelope, "signature_missing", "is a link"),
    "another type of payload": (rewrite(payloadType="application/json"), "signature_malformed", "payloadType"),
    "a type that begins alike": (rewrite(payloadType=f"{dsse.PAYLOAD_TYPE} 0 "), "signature_malformed", "payloadType"),
    "signed as another type": (
        lambda f: signed_over(f, lambda p: b"DSSEv1 16 application/json %d %s" % (len(p), p)), "signature_invalid", OWN_ID,
    ),
    "signed without a type": (lambda f: signed_over(f, lambda p: p), "signature_invalid", OWN_ID),
    "signed in base64": (lambda f: signed_over(f, base64.b64encode), "signature_invalid", OWN_ID),
    "a wrong signature of the same key after it": (sign_more((OWN_ID, bytes(64))), "signature_malformed", "twice"),
    "a wrong signature of the same key before it": (sign_more((OWN_ID, bytes(64)), first=True), "signature_malformed", "twice"),
    "signatures that are none": (rewrite(signatures={"keyid": OWN_ID, "sig": ""}), "signature_malformed", "DSSE"),
    "a signature of 63 bytes": (rewrite(signatures=[{"keyid": OWN_ID, "sig": "A" * 84}]), "signature_invalid", OWN_ID),
    "a signature of zeros": (rewrite(signatures=[{"keyid": OWN_ID, "sig": "A" * 86 + "=="}]), "signature_invalid", OWN_ID),
    "a key id in a list": (rewrite(signatures=[{"keyid": [OWN_ID], "sig": ""}]), "signing_key_unknown", "keys of the platform"),
    "an unknown field": (rewrite(note="reviewed"), "signature_malformed", "'note'"),
    "an unknown field of a signature": (
        rewrite(signatures=[{"keyid": "k", "sig": "", "cert": "x"}]), "signature_malformed", "'cert'",
    ),
    "characters around a signature": (lambda f: blot(f, "sig"), "signature_malformed", "DSSE"),
    "characters around the payload": (lambda f: blot(f, "payload"), "signature_malformed", "DSSE"),
    "a field twice": (state_twice, "signature_malformed", "twice"),
    "no signature": (lambda f: (f / ENVELOPE_FILE).unlink(), "signature_missing", ENVELOPE_FILE),
    "no JSON": (lambda f: (f / ENVELOPE_FILE).write_text("{"), "signature_malformed", ENVELOPE_FILE),
    "no envelope": (lambda f: (f / ENVELOPE_FILE).write_text("[]"), "signature_malformed", "DSSE"),
    "no signatures in it": (
        lambda f: (f / ENVELOPE_FILE).write_text(json.dumps(dsse.sign_statement({}, KEY) | {"signatures": []})),
        "signing_key_unknown", "no key",
    ),
    "a statement of another kind": (
        lambda f: (f / ENVELOPE_FILE).write_text(json.dumps(dsse.sign_statement({"_type": "x"}, KEY))),
        "signature_malformed", statements.STATEMENT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_and_named(folder: Path, change: str) -> None:
    statement, refused = signed_folder.check_signed_folder(folder, KEYS)
    assert refused == [] and statement == statement_of(folder)
    make, code, named = CHANGES[change]
    make(folder)
    statement, (refusal,) = signed_folder.check_signed_folder(folder, KEYS)
    assert refusal.code == code and named in refusal.detail
    assert (statement is None) == code.startswith("sign")


def test_a_signature_of_somebody_else_beside_ours_changes_nothing(folder: Path) -> None:
    """Whoever countersigns is not refused, and vouches for nothing."""
    sign_more((OTHER_ID, OTHER.sign(b"x")))(folder)
    assert signed_folder.check_signed_folder(folder, KEYS)[1] == []
    (refusal,) = signed_folder.check_signed_folder(folder, {**KEYS, OTHER_ID: OTHER.public_key()})[1]
    assert (refusal.code, OTHER_ID in refusal.detail) == ("signature_invalid", True), "of two keys that are known both must verify"


def test_a_signature_beside_the_folder_verifies_it(folder: Path, tmp_path: Path) -> None:
    beside = (folder / ENVELOPE_FILE).rename(tmp_path / "signature.json")
    assert signed_folder.check_signed_folder(folder, KEYS, envelope=beside)[1] == []


def test_one_statement_and_key_make_one_envelope(folder: Path) -> None:
    assert dsse.sign_statement(statement_of(folder), KEY) == dsse.sign_statement(statement_of(folder), KEY)


def test_key_ids_are_those_of_the_standard() -> None:
    """The key and the thumbprint of RFC 8037, appendix A."""
    key = public_keys.decode_key("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo")
    assert public_keys.key_id(key) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
    assert public_keys.read_key_set(public_keys.key_set([key])).keys() == {public_keys.key_id(key)}


@pytest.mark.parametrize(
    "document", [None, {}, {"keys": 3}, {"keys": [{"kty": "RSA"}]}, {"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "AA"}]}]
)
def test_what_is_no_key_set_is_refused(document: object) -> None:
    with pytest.raises(InvalidRequest, match="ft models keys"):
        public_keys.read_key_set(document)
