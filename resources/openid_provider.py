"""Sign-in at an OpenID Connect provider: authorization code flow with PKCE, state and nonce.

The provider's description and keys are fetched when they are needed and kept for an hour; an unknown key is looked up again. Nothing that a
browser carries is trusted: the code is redeemed with the provider, whose ID token must be signed by one of its keys, for this client, for
this sign-in, and valid now.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus, urlsplit

import httpx
from authlib.common.security import generate_token
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from control_plane.platform.protocols import Authorization, Identity
from core.errors import Forbidden, Unavailable
from core.storable_text import printable

SCOPE = "openid email profile"
ADDRESS = ("email", "email_verified")
SIGNATURES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by the provider's key; never ``none``, nor one by the client's secret."""
TIMEOUT_S = 5.0
LEEWAY_S = 60
"""By how much the provider's clock may differ from ours."""
KEPT_S = 3600.0
RETRY_S = 5.0
"""Seconds after a failed request during which no other is made; and between two look-ups of an unknown key."""
SECRET_CHARS = 48
MAX_QUOTED = 200
MAX_BYTES, WHOLE_S = 1 << 20, 15.0
"""Limits of an answer of the provider and of its time, also if it never ends or comes slowly: other sign-ins wait for its documents."""
RSA_CHARS = 342
"""Characters of a modulus of 2,048 bits in a key set; shorter ones can be factored."""


@dataclass(frozen=True, slots=True)
class _Kept:
    document: Mapping[str, Any]
    at: float


class OpenIdProvider:
    """The provider at `issuer`. Thread-safe."""

    def __init__(
        self,
        *,
        issuer: str,
        client_id: str,
        client_secret: Callable[[], str] = str,
        groups_claim: str = "groups",
        clock: Callable[[], float] = time.time,
        retry_s: float = RETRY_S,
    ) -> None:
        self._issuer, self._client_id, self._client_secret, self._groups_claim, self._clock, self._retry_s = (
            issuer, client_id, client_secret, groups_claim, clock, retry_s,
        )  # fmt: skip
        self.host = urlsplit(issuer).netloc
        self._kept: dict[str, _Kept] = {}
        self._failed_at = -retry_s
        self._lock = threading.Lock()

    def begin(self, redirect_uri: str, *, another_account: bool = False) -> Authorization:
        """Return where the browser signs in."""
        endpoint = self._description()["authorization_endpoint"]
        state, nonce, verifier = (generate_token(SECRET_CHARS) for _ in range(3))
        url = prepare_grant_uri(
            endpoint, self._client_id, "code", redirect_uri, SCOPE, state,
            nonce=nonce, code_challenge=create_s256_code_challenge(verifier), code_challenge_method="S256",
            prompt="select_account" if another_account else None,
        )  # fmt: skip
        return Authorization(url=url, state=state, nonce=nonce, verifier=verifier)

    def redeem(self, code: str, *, nonce: str, verifier: str, redirect_uri: str) -> Identity:
        """Exchange `code` for an ID token and verify it."""
        token = self._token(code, verifier=verifier, redirect_uri=redirect_uri)
        claims = self._verified(str(token.get("id_token", "")), nonce=nonce, access_token=token.get("access_token"))
        if not {*ADDRESS, self._groups_claim} <= claims.keys():
            more = self._user_info(token, claims["sub"])
            if "email" in more and not claims.keys() >= set(ADDRESS):  # which of two addresses is verified must come from one document
                claims = {**claims, **{name: more.get(name) for name in ADDRESS}}
            claims = {self._groups_claim: more.get(self._groups_claim, ()), **claims}
        email = claims.get("email")
        if not isinstance(email, str) or not email:
            raise _untrusted(f"the identity provider {self.host} does not say your e-mail address; allow the scope email there")
        if (shown := printable(email)) != email:
            raise _untrusted(
                f"the e-mail address {shown[:MAX_QUOTED]} from {self.host} holds a character that no address has; correct it there"
            )
        if claims.get("email_verified") is not True:
            raise Forbidden(
                f"{printable(email)[:MAX_QUOTED]} is not verified at {self.host}; confirm the address there, then sign in again",
                code="email_not_verified",
            )
        groups = claims.get(self._groups_claim, ())
        return Identity(email=email, groups=tuple(map(str, groups)) if isinstance(groups, list | tuple) else (str(groups),))

    def _description(self) -> Mapping[str, Any]:
        found = self._document(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if str(found.get("issuer", "")).rstrip("/") != self._issuer.rstrip("/"):
            says = printable(str(found.get("issuer")))[:MAX_QUOTED]
            raise _untrusted(f"the identity provider calls itself {says!r}, and FT_OIDC_ISSUER is {self._issuer!r}; they must be the same")
        if missing := [name for name in ("authorization_endpoint", "token_endpoint", "jwks_uri") if not isinstance(found.get(name), str)]:
            raise _untrusted(f"the identity provider {self.host} does not publish its {', '.join(missing)}")
        return found

    def _document(self, url: str, *, newer_than: float = -1.0) -> Mapping[str, Any]:
        """Return a JSON document of the provider, at most an hour old and fetched after `newer_than`."""
        with self._lock:
            kept, now = self._kept.get(url), time.monotonic()
            if kept is not None and now - kept.at < KEPT_S and kept.at > newer_than:
                return kept.document
            if now - self._failed_at < self._retry_s:
                raise self._unavailable("it did not answer a moment ago")
            try:
                document = self._answer("GET", url)
            except Unavailable:
                self._failed_at = time.monotonic()
                raise
            self._kept[url] = _Kept(document, time.monotonic())
            return document

    def _token(self, code: str, *, verifier: str, redirect_uri: str) -> Mapping[str, Any]:
        description, secret = self._description(), self._client_secret()
        fields = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri, "code_verifier": verifier}
        auth = httpx.Auth()
        methods = description.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if secret and "client_secret_basic" in methods:
            auth = httpx.BasicAuth(quote_plus(self._client_id), quote_plus(secret))
        else:
            fields |= {"client_id": self._client_id} | ({"client_secret": secret} if secret else {})
        return self._answer("POST", description["token_endpoint"], data=fields, auth=auth)

    def _user_info(self, token: Mapping[str, Any], subject: str) -> Mapping[str, Any]:
        """Return further claims, which must be of the same person."""
        url, headers = self._description().get("userinfo_endpoint"), {"authorization": f"Bearer {token.get('access_token')}"}
        if not isinstance(url, str):
            return {}
        found = self._answer("GET", url, headers=headers)
        if found.get("sub") != subject:
            raise _untrusted(f"the identity provider {self.host} answered about another person; sign in again")
        return found

    def _answer(self, method: str, url: str, **request: Any) -> Mapping[str, Any]:
        until, body = time.monotonic() + WHOLE_S, b""
        accepted = {"accept": "application/json", "accept-encoding": "identity"}  # a packed answer is a thousand times as long
        try:
            with httpx.Client(timeout=TIMEOUT_S, headers=accepted) as http, http.stream(method, url, **request) as answer:
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > MAX_BYTES or time.monotonic() > until:
                        raise self._unavailable(f"its answer at {answer.url.path} is longer than {MAX_BYTES} bytes or {WHOLE_S:g} s")
        except httpx.HTTPError as error:
            raise self._unavailable(str(error) or type(error).__name__) from error
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if answer.status_code in (400, 401) and isinstance(document, dict):
            raise _refused(self.host, document)
        if answer.status_code != 200 or not isinstance(document, dict):
            raise self._unavailable(f"it answered {answer.status_code} at {answer.url.path}")
        return document

    def _verified(self, id_token: str, *, nonce: str, access_token: object) -> Mapping[str, Any]:
        token = self._signed(id_token)
        issuer, now = self._description()["issuer"], int(self._clock())
        claims = CodeIDToken(
            token.claims, token.header,
            options={"iss": {"essential": True, "value": issuer}, "aud": {"essential": True, "value": self._client_id}},
            params={"nonce": nonce, "client_id": self._client_id, "access_token": access_token},
        )  # fmt: skip
        try:
            claims.validate(now=now, leeway=LEEWAY_S)
        except (JoseError, TypeError, ValueError, AttributeError, OverflowError) as error:  # a claim of another type breaks its check
            raise _untrusted(self._why(token.claims, issuer=issuer, nonce=nonce, now=now) or str(error)) from error
        return token.claims

    def _signed(self, id_token: str) -> jwt.Token:
        """Return the token if one of the provider's keys signed it."""
        url, began = self._description()["jwks_uri"], time.monotonic()
        try:
            try:
                return jwt.decode(id_token, _keys(self._document(url)), algorithms=SIGNATURES)
            except (InvalidKeyIdError, BadSignatureError):
                return jwt.decode(id_token, _keys(self._document(url, newer_than=began - self._retry_s)), algorithms=SIGNATURES)
        except (JoseError, ValueError, RecursionError) as error:
            raise _untrusted(f"no key of the identity provider {self.host} verifies its ID token ({error}); sign in again") from error

    def _why(self, claims: Mapping[str, Any], *, issuer: str, nonce: str, now: int) -> str | None:
        """Say what is wrong with claims, with both values and what to do; None if it is something else."""
        audience, expires_at, issued_at = claims.get("aud"), claims.get("exp"), claims.get("iat")
        if claims.get("iss") != issuer:
            return f"the ID token is of {printable(str(claims.get('iss')))[:MAX_QUOTED]!r}, not of {issuer!r}; check FT_OIDC_ISSUER"
        if self._client_id not in (audience if isinstance(audience, list) else [audience]):
            return f"the ID token is for {printable(str(audience))[:MAX_QUOTED]}, not for {self._client_id!r}; check FT_OIDC_CLIENT_ID"
        if claims.get("nonce") != nonce:
            return "the ID token belongs to another sign-in; sign in again"
        compared = f"and the platform's clock says {_clock(now)}; compare it with the clock of {self.host}"
        if isinstance(expires_at, int | float) and expires_at <= now - LEEWAY_S:
            return f"the ID token expired at {_clock(expires_at)}, {compared}"
        if isinstance(issued_at, int | float) and issued_at > now + LEEWAY_S:
            return f"the ID token was issued at {_clock(issued_at)}, {compared}"
        return None

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(f"the identity provider {self.host} cannot be reached: {why}; try again in a moment", code="oidc_unavailable")


def _keys(document: Mapping[str, Any]) -> KeySet:
    found = document.get("keys")
    keys = [key for key in found if isinstance(key, dict)] if isinstance(found, list) else []
    return KeySet.import_key_set({"keys": [key for key in keys if key.get("kty") != "RSA" or len(str(key.get("n"))) >= RSA_CHARS]})


def _clock(moment: float) -> str:
    try:
        return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # no calendar has it
        return f"{moment:.0f}"


def _refused(host: str, document: Mapping[str, Any]) -> Forbidden:
    code = printable(str(document.get("error")))[:MAX_QUOTED]
    remedy = {
        "invalid_client": "check FT_OIDC_CLIENT_ID and its secret",
        "invalid_grant": "the sign-in took too long or was used before; sign in again",
    }.get(code, printable(str(document.get("error_description") or "sign in again"))[:MAX_QUOTED])
    return Forbidden(f"the identity provider {host} refused the sign-in ({code}): {remedy}", code="oidc_refused")


def _untrusted(message: str) -> Forbidden:
    return Forbidden(message, code="oidc_not_trusted")
