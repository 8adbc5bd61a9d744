"""ID tokens that a provider did not sign for this client and this sign-in open nothing, however they are forged."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from joserfc import jwe
from joserfc.jwk import ECKey, RSAKey

from core.errors import Forbidden, FtError, Unavailable
from resources import openid_provider
from resources.openid_provider import OpenIdProvider
from tests.support.servers.raw_server import RawServer, raw_server

CLIENT, SECRET, NONCE = "ft-console", "client-secret-of-32-characters-xx", "nonce-1"
RSA_KEY, EC_KEY = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())
STRANGER, STRANGERS_EC = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())
PEM = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
DER = RSA_KEY.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
KEYS = [
    {**RSAKey.import_key(RSA_KEY.public_key()).as_dict(private=False), "kid": "rsa", "use": "sig", "alg": "RS256"},
    {**ECKey.import_key(EC_KEY.public_key()).as_dict(private=False), "kid": "ec", "use": "sig", "alg": "ES256"},
]
Sign = Callable[[bytes], bytes]


class Idp:
    """What the provider publishes and answers; a test changes it."""

    def __init__(self) -> None:
        self.keys: Any = KEYS
        self.id_token = ""
        self.answers: dict[str, Callable[[], Any]] = {}
        """Pieces of raw answers by path."""
        self.server: RawServer

    def __call__(self, line: str) -> Any:
        path = line.split(" ")[1]
        if path in self.answers:
            return self.answers[path]()
        url = self.server.url
        documents: dict[str, Any] = {
            "/.well-known/openid-configuration": {
                "issuer": url, "authorization_endpoint": f"{url}/authorize", "token_endpoint": f"{url}/token", "jwks_uri": f"{url}/jwks",
            },
            "/jwks": {"keys": self.keys},
            "/token": {"id_token": self.id_token, "access_token": "access", "token_type": "Bearer"},
        }  # fmt: skip
        body = json.dumps(documents[path]).encode()
        return [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body), body]

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        found = {
            "iss": self.server.url, "aud": CLIENT, "sub": "1", "nonce": NONCE, "iat": now, "exp": now + 300, "email": "ada@example.com",
            "email_verified": True, "groups": [], **changes,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not ...}

    def redeem(self) -> str:
        provider = OpenIdProvider(issuer=self.server.url, client_id=CLIENT, client_secret=lambda: SECRET, retry_s=0.0)
        return provider.redeem("code", nonce=NONCE, verifier="v", redirect_uri="http://127.0.0.1/cb").email


@pytest.fixture
def idp() -> Iterator[Idp]:
    made = Idp()
    with raw_server(made) as server:
        made.server = server
        yield made


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def rs256(key: rsa.RSAPrivateKey = RSA_KEY) -> Sign:
    return lambda data: key.sign(data, padding.PKCS1v15(), hashes.SHA256())


def es256(key: ec.EllipticCurvePrivateKey = EC_KEY, *, der: bool = False) -> Sign:
    def sign(data: bytes) -> bytes:
        made = key.sign(data, ec.ECDSA(hashes.SHA256()))
        return made if der else b"".join(part.to_bytes(32, "big") for part in decode_dss_signature(made))

    return sign


def hs256(secret: bytes) -> Sign:
    return lambda data: hmac.new(secret, data, hashlib.sha256).digest()


def token(header: Any, payload: Any, sign: Sign) -> str:
    """A token of parts that are JSON, or text as it is to be."""
    parts = [
        part if isinstance(part, bytes) else (part if isinstance(part, str) else json.dumps(part)).encode() for part in (header, payload)
    ]
    signed = ".".join(map(b64, parts)).encode()
    return f"{signed.decode()}.{b64(sign(signed))}"


def stranger(**header: Any) -> Callable[[dict[str, Any]], str]:
    """Signed by somebody else's key, under these headers."""
    return lambda claims: token({"alg": "RS256", "kid": "rsa", **header}, claims, rs256(STRANGER))


def mac(secret: bytes, **header: Any) -> Callable[[dict[str, Any]], str]:
    return lambda claims: token({"alg": "HS256", "kid": "rsa", **header}, claims, hs256(secret))


def unsigned(alg: Any) -> Callable[[dict[str, Any]], str]:
    return lambda claims: token({"alg": alg, "kid": "rsa"}, claims, lambda _: b"")


OWN_JWK = RSAKey.import_key(STRANGER.public_key()).as_dict(private=False)
FORGED: dict[str, Callable[[dict[str, Any]], str]] = {
    "alg none": unsigned("none"), "alg None": unsigned("None"), "alg nOnE": unsigned("nOnE"), "an empty alg": unsigned(""),
    "alg null": unsigned(None), "alg is a list": unsigned(["RS256"]), "no signature": unsigned("RS256"),
    "no alg": lambda claims: token({"kid": "rsa"}, claims, rs256()),
    "HS256 with the public key": mac(PEM), "HS256 with the public key, DER": mac(DER), "HS256 with its modulus": mac(KEYS[0]["n"].encode()),
    "HS256 with the client's secret": mac(SECRET.encode()), "HS256 with nothing": mac(b""), "HS256 without a kid": mac(PEM, kid=None),
    "HS512 called RS256": mac(PEM, alg="RS256"),
    "an EC signature for the RSA key": lambda claims: token({"alg": "ES256", "kid": "rsa"}, claims, es256(STRANGERS_EC)),
    "an RSA signature for the EC key": lambda claims: token({"alg": "RS256", "kid": "ec"}, claims, rs256()),
    "the RSA key as PS256": lambda claims: token({"alg": "PS256", "kid": "rsa"}, claims, rs256()),
    "an ECDSA signature of zeros": lambda claims: token({"alg": "ES256", "kid": "ec"}, claims, lambda _: bytes(64)),
    "an ECDSA signature in DER": lambda claims: token({"alg": "ES256", "kid": "ec"}, claims, es256(der=True)),
    "a stranger's key": stranger(), "without a kid": stranger(kid=None), "an unknown kid": stranger(kid="other"),
    "a kid that is a path": stranger(kid="../../../../dev/null"), "a kid that is SQL": stranger(kid="x' UNION SELECT 'a' -- "),
    "a kid that is a command": stranger(kid="key|/usr/bin/id"), "a kid that is a number": stranger(kid=0),
    "a kid that is a list": stranger(kid=["rsa"]),
    "its own key in the header": stranger(jwk=OWN_JWK), "its own key and kid": stranger(jwk=OWN_JWK, kid="own"),
    "jku": stranger(jku="http://127.0.0.1:1/jwks", kid="own"), "x5u": stranger(x5u="http://127.0.0.1:1/x"), "x5c": stranger(x5c=["AAAA"]),
    "an unknown critical header": lambda claims: token({"alg": "RS256", "kid": "rsa", "crit": ["ft"], "ft": 1}, claims, rs256()),
    "a critical header that is absent": lambda claims: token({"alg": "RS256", "kid": "rsa", "crit": ["exp"]}, claims, rs256()),
    "a critical header that is text": lambda claims: token({"alg": "RS256", "kid": "rsa", "crit": "exp"}, claims, rs256()),
    "zip": lambda claims: token({"alg": "RS256", "kid": "rsa", "zip": "DEF"}, zlib.compress(json.dumps(claims).encode())[2:-4], rs256()),
    "an algorithm twice, none last": lambda claims: token('{"alg": "RS256", "kid": "rsa", "alg": "none"}', claims, lambda _: b""),
    "an algorithm twice, none first": lambda claims: token('{"alg": "none", "kid": "rsa", "alg": "RS256"}', claims, rs256(STRANGER)),
    "encrypted for the provider's key": lambda claims: jwe.encrypt_compact(
        {"alg": "RSA-OAEP", "enc": "A128CBC-HS256", "kid": "rsa"}, json.dumps(claims).encode(), RSAKey.import_key(RSA_KEY.public_key())
    ),
    "claims of another token": lambda claims: token({"alg": "RS256", "kid": "rsa"}, claims | {"sub": "2"}, lambda _: rs256()(b"x")),
    "signed, then changed": lambda claims: ".".join(
        [*token({"alg": "RS256", "kid": "rsa"}, claims, rs256()).split(".")[:1], b64(json.dumps(claims | {"sub": "2"}).encode()),
         token({"alg": "RS256", "kid": "rsa"}, claims, rs256()).split(".")[2]]
    ),
    "in JSON": lambda claims: json.dumps({"payload": b64(json.dumps(claims).encode()), "signatures": []}),
    "nothing": lambda claims: "", "two points": lambda claims: "..", "no base64": lambda claims: "!.!.!",
    "not ASCII": lambda claims: "\u00e9.\u00e9.\u00e9",
}  # fmt: skip


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_token_is_not_trusted(idp: Idp, attack: str) -> None:
    idp.id_token = FORGED[attack](idp.claims())
    with pytest.raises(Forbidden) as refused:
        idp.redeem()
    assert refused.value.code == "oidc_not_trusted"
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(("alg", "sign"), [("RS256", rs256()), ("ES256", es256())], ids=["RS256", "ES256"])
def test_a_token_that_the_provider_signed_is(idp: Idp, alg: str, sign: Sign) -> None:
    idp.id_token = token({"alg": alg, "kid": {"RS256": "rsa", "ES256": "ec"}[alg], "typ": "JWT"}, idp.claims(), sign)
    assert idp.redeem() == "ada@example.com"


INFINITE = float("inf")
CLAIMS: dict[str, dict[str, Any]] = {
    **{f"no {name}": {name: ...} for name in ("iss", "aud", "sub", "exp", "iat", "nonce")},
    "not valid yet": {"nbf": int(time.time()) + 3600}, "expired in the year 1": {"exp": -62135596800},
    "expired long before": {"exp": -(10**30)},
    "expired an infinite time ago": {"exp": -INFINITE}, "issued in an infinite time": {"iat": INFINITE},
    "an expiry that is no number": {"exp": float("nan")},
    "an expiry in words": {"exp": "tomorrow"}, "an expiry in a list": {"exp": [int(time.time()) + 60]},
    "issued in the far future": {"iat": 10**30},
    "an audience that is an object": {"aud": {CLIENT: 1}}, "an audience in a list of lists": {"aud": [[CLIENT]]},
    "no audience in a list": {"aud": []},
    "an audience that begins alike": {"aud": f"{CLIENT}-2"}, "an issuer that begins alike": {"iss": "http://127.0.0.1"},
    "an issuer in a list": {"iss": ["x"]},
    "a nonce in a list": {"nonce": [NONCE]}, "an empty nonce": {"nonce": ""}, "a nonce of null": {"nonce": None},
    "azp in a list": {"azp": [CLIENT]},
    "a hash that is a number": {"at_hash": 1}, "a hash that is a list": {"at_hash": ["x"]},
    "an address that is an object": {"email": {"a": 1}}, "an address that is a list": {"email": ["ada@example.com"]},
}  # fmt: skip


@pytest.mark.parametrize("claims", CLAIMS)
def test_claims_of_another_shape_are_refused_and_break_nothing(idp: Idp, claims: str) -> None:
    idp.id_token = token({"alg": "RS256", "kid": "rsa"}, idp.claims(**CLAIMS[claims]), rs256())
    with pytest.raises(Forbidden) as refused:
        idp.redeem()
    assert refused.value.code == "oidc_not_trusted"


PAYLOADS = {
    "a list": "[1]",
    "a word": '"x"',
    "no JSON": "{",
    "nesting without an end": "[" * 200_000,
    "no UTF-8": b"\xff\xfe",
    "null": "null",
}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_that_holds_no_claims_is_refused(idp: Idp, payload: str) -> None:
    idp.id_token = token({"alg": "RS256", "kid": "rsa"}, PAYLOADS[payload], rs256())
    with pytest.raises(Forbidden):
        idp.redeem()


def test_of_a_claim_that_is_there_twice_the_last_counts_in_every_check(idp: Idp) -> None:
    text = json.dumps(idp.claims())
    for name, other in (("aud", "another"), ("nonce", "another"), ("iss", "http://another.example")):
        idp.id_token = token({"alg": "RS256", "kid": "rsa"}, f'{text[:-1]}, "{name}": "{other}"}}', rs256())
        with pytest.raises(Forbidden, match="another"):
            idp.redeem()


KEY_SETS = {
    "none": [], "null": None, "text": "keys", "a list of numbers": [1],
    "an RSA key without a modulus": [{"kty": "RSA", "kid": "rsa", "e": "AQAB"}],
    "a secret": [{"kty": "oct", "kid": "rsa", "k": b64(PEM)}], "an unknown kind": [{"kty": "XYZ", "kid": "rsa"}],
    "an object": {"kid": "rsa"},
    "a key for encryption": [{**KEYS[0], "use": "enc"}], "a key of another algorithm": [{**KEYS[0], "alg": "RS512"}],
}  # fmt: skip


@pytest.mark.parametrize("keys", KEY_SETS)
def test_a_key_set_that_has_no_key_for_it_verifies_nothing(idp: Idp, keys: str) -> None:
    idp.keys = KEY_SETS[keys]
    sign = hs256(PEM) if keys == "a secret" else rs256()
    idp.id_token = token({"alg": "HS256" if keys == "a secret" else "RS256", "kid": "rsa"}, idp.claims(), sign)
    with pytest.raises(Forbidden) as refused:
        idp.redeem()
    assert refused.value.code == "oidc_not_trusted"


def test_a_key_that_can_be_factored_verifies_nothing(idp: Idp) -> None:
    short = rsa.generate_private_key(65537, 1024)
    public = short.public_key().public_numbers()
    idp.keys = [{"kty": "RSA", "kid": "rsa", "n": b64(public.n.to_bytes(128, "big")), "e": "AQAB"}]
    idp.id_token = token({"alg": "RS256", "kid": "rsa"}, idp.claims(), rs256(short))
    with pytest.raises(Forbidden) as refused:
        idp.redeem()
    assert refused.value.code == "oidc_not_trusted"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ANSWERS: dict[str, Callable[[], Any]] = {
    "a body without an end": lambda: itertools.chain([HEAD + b'\r\n{"a": "'], itertools.repeat(b"x" * 65536)),
    "a body that comes slowly": lambda: itertools.chain([HEAD + b"\r\n"], (time.sleep(0.2) or b" " for _ in itertools.count())),
    "a bomb": lambda: [HEAD + b"Content-Encoding: gzip\r\n\r\n" + zlib.compress(bytes(1 << 28), wbits=31)],
    "a page": lambda: [b"HTTP/1.1 500 Oops\r\nContent-Type: text/html\r\n\r\n<html>" + SECRET.encode()],
    "a redirect": lambda: [b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/x\r\nContent-Length: 0\r\n\r\n"],
    "nesting without an end": lambda: [HEAD + b"\r\n" + b"[" * 500_000],
}


@pytest.mark.parametrize("path", ["/.well-known/openid-configuration", "/jwks", "/token"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_no_document_is_an_outage(idp: Idp, answer: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openid_provider, "WHOLE_S", 1.0)
    idp.id_token = token({"alg": "RS256", "kid": "rsa"}, idp.claims(), rs256())
    idp.answers[path] = ANSWERS[answer]
    begun = time.monotonic()
    with pytest.raises(FtError) as refused:
        idp.redeem()
    assert isinstance(refused.value, Unavailable) and refused.value.code == "oidc_unavailable"
    assert time.monotonic() - begun < 20
    assert SECRET not in refused.value.message and idp.server.num_bytes < 64 << 20
