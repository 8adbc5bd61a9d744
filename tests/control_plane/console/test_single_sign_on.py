"""Sign-in with a real OpenID provider: who gets in, as what, and why others do not."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.composition import identity_provider
from control_plane.platform.context import Actor, Platform
from control_plane.platform.settings import load
from control_plane.tenants import audit_log, members, operators, sessions, suspension
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import console_sessions
from core.errors import Forbidden
from resources.openid_provider import OpenIdProvider
from tests.control_plane.console.conftest import Visitor
from tests.support.processes.openid_provider import CLIENT, SECRET, Provider, openid_provider
from tests.support.servers.served_app import served

HERE = Actor(kind="operator", id="cli:test")


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with openid_provider() as running:
        yield running


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def with_provider(new_platform: Callable[..., Platform], provider: Provider, port: int, **env: str) -> Platform:
    given = {
        "oidc_issuer": provider.url, "oidc_client_id": CLIENT, "oidc_client_secret": SECRET, "public_url": f"http://127.0.0.1:{port}",
        "oidc_operators": "root@example.com, ft-operators", "operator_contact": "help@example.com", **env,
    }  # fmt: skip
    made = new_platform(**given)
    return replace(made, identity=identity_provider(made.settings))


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], provider: Provider, port: int) -> Platform:
    return with_provider(new_platform, provider, port)


@pytest.fixture(scope="module")
def api_url(platform: Platform, port: int) -> Iterator[str]:
    with served(create_app(platform), port=port) as url:
        yield url


class Person:
    """A person with a browser."""

    def __init__(self, url: str, provider: Provider) -> None:
        self.http = httpx.Client(base_url=url, headers={"accept": "text/html"})
        self.provider = provider

    def start(self, next: str = "/console") -> str:
        """Press the button; returns where the browser is sent."""
        answer = self.http.get("/console/oidc/start", params={"next": next})
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    def sign_in(self, subject: str, next: str = "/console") -> httpx.Response:
        """Sign in at the provider and come back; returns the console's answer."""
        return self.http.get(self.provider.allow(self.start(next), subject))


@pytest.fixture
def person(api_url: str, provider: Provider) -> Iterator[Person]:
    made = Person(api_url, provider)
    yield made
    made.http.close()


def member(platform: Platform, tenant: Tenant, email: str, role: str = "member") -> str:
    return members.add(platform, tenant.id, email=email, role=role).id


def test_a_member_signs_in_and_comes_back_to_the_page_they_wanted(platform: Platform, tenant: Tenant, person: Person) -> None:
    member(platform, tenant, "Ada@example.com")
    answer = person.sign_in(person.provider.person("ada@example.com"), "/console/jobs?status=failed")
    assert answer.status_code == 200
    assert "url=/console/jobs?status=failed" in answer.text, "a page of ours goes on, so that the browser sends the strict cookie"
    cookie = next(c for c in answer.headers.get_list("set-cookie") if c.startswith(sessions.COOKIE))
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Max-Age=43200"))
    page = person.http.get("/console/jobs?status=failed")
    assert page.status_code == 200
    assert tenant.name in page.text
    assert "member" in page.text


def test_the_request_to_the_provider_has_pkce_state_and_nonce_of_its_own(person: Person) -> None:
    one, two = (parse_qs(urlsplit(person.start()).query) for _ in range(2))
    assert one["redirect_uri"] == [f"{str(person.http.base_url).rstrip('/')}/console/oidc/callback"]
    assert (one["response_type"], one["scope"], one["code_challenge_method"]) == (["code"], ["openid email profile"], ["S256"])
    for name in ("state", "nonce", "code_challenge"):
        assert len(one[name][0]) >= 43, name
        assert one[name] != two[name], name


@pytest.mark.parametrize(("role", "scope"), [("viewer", "read"), ("member", "write"), ("owner", "admin")])
def test_a_session_may_do_what_the_role_allows(platform: Platform, tenant: Tenant, person: Person, role: str, scope: str) -> None:
    id_ = member(platform, tenant, f"{role}@roles.example.com", role)
    person.sign_in(person.provider.person(f"{role}@roles.example.com"))
    me = person.http.get("/v1/me").json()
    assert (me["tenant_id"], me["key"], me["member"]["id"], me["scopes"]) == (tenant.id, None, id_, [scope])
    assert person.http.get("/console/members").status_code == (200 if scope == "admin" else 403)


def test_a_change_needs_the_csrf_token_and_names_the_member_in_the_audit_log(platform: Platform, tenant: Tenant, person: Person) -> None:
    id_ = member(platform, tenant, "owner@audit.example.com", "owner")
    person.sign_in(person.provider.person("owner@audit.example.com"))
    assert person.http.post("/console/members", data={"email": "new@audit.example.com"}).status_code == 403
    assert Visitor(person.http).post("/console/members", email="new@audit.example.com").status_code == 303
    line = audit_log.read(platform, tenant.id, audit_log.Wanted(actor=id_)).items[0]
    assert (line.actor_kind, line.member_id, line.email, line.action) == ("member", id_, "owner@audit.example.com", "member.created")
    assert person.http.get("/console/audit").text.count("owner@audit.example.com") >= 1


def test_a_removed_member_is_signed_out_at_once(platform: Platform, tenant: Tenant, person: Person) -> None:
    id_ = member(platform, tenant, "gone@example.com")
    subject = person.provider.person("gone@example.com")
    person.sign_in(subject)
    assert person.http.get("/console").status_code == 200
    members.remove(platform, tenant.id, id_)
    assert person.http.get("/console").headers["location"].startswith("/console/sign-in")
    refused = person.sign_in(subject)
    assert (refused.status_code, "gone@example.com" in refused.text) == (403, True)
    assert sessions.COOKIE not in person.http.cookies


def test_somebody_unknown_learns_which_address_has_no_membership_and_whom_to_ask(person: Person) -> None:
    answer = person.sign_in(person.provider.person("<b>nobody</b>@example.com"))
    assert answer.status_code == 403
    assert "&lt;b&gt;nobody&lt;/b&gt;@example.com" in answer.text
    assert "help@example.com" in answer.text
    assert sessions.COOKIE not in person.http.cookies
    again = parse_qs(urlsplit(person.http.get("/console/oidc/start?another=true").headers["location"]).query)
    assert again["prompt"] == ["select_account"]


def test_a_person_of_several_tenants_chooses_one_and_sees_only_that(platform: Platform, person: Person) -> None:
    for name in ("north", "south"):
        tenants.create(platform, name, name=f"{name.title()} & Co", owner_email="both@example.com")
    answer = person.sign_in(person.provider.person("both@example.com"), "/console/models")
    assert "url=/console/oidc/choose" in answer.text
    assert sessions.COOKIE not in person.http.cookies
    page = person.http.get("/console/oidc/choose")
    assert page.text.index("North &amp; Co") < page.text.index("South &amp; Co")
    south = members.list_members(platform, "south").items[0].id
    stranger = members.add(platform, "south", email="other@example.com", role="owner").id
    assert person.http.post("/console/oidc/choose", data={"choice": stranger}).headers["location"] == "/console/oidc/choose"
    elsewhere = person.http.post("/console/oidc/choose", data={"choice": south}, headers={"origin": "https://evil.example"})
    assert (elsewhere.status_code, sessions.COOKIE in person.http.cookies) == (403, False)
    chosen = person.http.post("/console/oidc/choose", data={"choice": south})
    assert chosen.headers["location"] == "/console/models"
    assert person.http.get("/v1/me").json()["tenant_id"] == "south"
    assert person.http.get("/console/oidc/choose").headers["location"] == "/console/oidc/start", "a choice is made once"


def test_a_suspended_tenant_stays_closed(platform: Platform, tenant: Tenant, person: Person) -> None:
    member(platform, tenant, "late@example.com")
    suspension.suspend(platform, tenant.id, reason="unpaid")
    answer = person.sign_in(person.provider.person("late@example.com"))
    assert (answer.status_code, "unpaid" in answer.text, sessions.COOKIE in person.http.cookies) == (403, True, False)


def test_operators_are_named_by_address_or_group(platform: Platform, person: Person) -> None:
    for email, groups in (("ROOT@example.com", []), ("ops@example.com", ["staff", "ft-operators"])):
        answer = person.sign_in(person.provider.person(email, groups=groups), "/console/jobs")
        assert "url=/console/operator" in answer.text, email
        assert person.http.get("/v1/admin/tenants").status_code == 200
        assert person.http.get("/v1/me").json()["error"]["code"] == "tenant_key_required"
        assert person.http.get("/console").headers["location"] == "/console/operator"
    outsider = person.sign_in(person.provider.person("staff@example.com", groups=["staff"]))
    assert outsider.status_code == 403


def test_an_operator_loses_access_when_the_setting_no_longer_names_them(platform: Platform, person: Person) -> None:
    person.sign_in(person.provider.person("root@example.com"))
    secret = person.http.cookies[sessions.COOKIE]
    assert sessions.authenticate_operator(platform, secret).id == "oidc:root@example.com"
    fewer = replace(platform, settings=replace(platform.settings, oidc_operators=("ft-operators",)))
    with pytest.raises(Exception, match="sign in again"):
        sessions.authenticate_operator(fewer, secret)


def test_an_operator_who_is_a_member_too_chooses(platform: Platform, tenant: Tenant, person: Person) -> None:
    id_ = member(platform, tenant, "both@ops.example.com")
    person.sign_in(person.provider.person("both@ops.example.com", groups=["ft-operators"]))
    assert "Operators" in person.http.get("/console/oidc/choose").text
    assert person.http.post("/console/oidc/choose", data={"choice": "operator"}).headers["location"] == "/console/operator"
    person.sign_in(person.provider.person("both@ops.example.com", groups=["ft-operators"]))
    assert person.http.post("/console/oidc/choose", data={"choice": id_}).headers["location"] == "/console"
    assert person.http.get("/v1/admin/tenants").json()["error"]["code"] == "operator_key_required"


def test_tenants_read_no_operators_name_in_their_audit_log(platform: Platform, tenant: Tenant, person: Person) -> None:
    person.sign_in(person.provider.person("root@example.com"))
    token = sessions.csrf_token(person.http.cookies[sessions.COOKIE])
    body = {"soft_gpu_hours": 12.0}
    assert person.http.post(f"/v1/admin/tenants/{tenant.id}", json=body).json()["error"]["code"] == "csrf_token_invalid"
    assert person.http.post(f"/v1/admin/tenants/{tenant.id}", json=body, headers={"x-csrf-token": token}).status_code == 200
    key = tenants.create_key(platform, tenant.id, name="a", scopes=["admin"])
    seen = httpx.get(f"{person.http.base_url}/v1/audit_log", headers={"authorization": f"Bearer {key.secret}"}, params={"limit": 50})
    actors = {line["actor"]["id"] for line in seen.json()["data"] if line["actor"]["type"] == "operator"}
    assert actors == {"oidc"}
    assert "root@example.com" not in seen.text


CLAIMS = [
    ({"email_verified": False}, "email_not_verified", "is not verified"),
    ({"email_verified": 1}, "email_not_verified", "is not verified"),
    ({"email_verified": "true"}, "email_not_verified", "is not verified"),
    ({"email_verified": None}, "email_not_verified", "is not verified"),
    ({"email": "ada\0@example.com"}, "oidc_not_trusted", "a character that no address has"),
    ({"email": ""}, "oidc_not_trusted", "does not say your e-mail address"),
    ({"aud": ["another-client"]}, "oidc_not_trusted", "another-client"),
    ({"aud": [CLIENT, "another-client"], "azp": "another-client"}, "oidc_not_trusted", "azp"),
    ({"nonce": "replayed"}, "oidc_not_trusted", "belongs to another sign-in"),
    ({"iss": "https://login.evil.example"}, "oidc_not_trusted", "login.evil.example"),
    ({"exp": int(time.time()) - 600}, "oidc_not_trusted", "expired at"),
    ({"iat": int(time.time()) + 3600, "exp": int(time.time()) + 7200}, "oidc_not_trusted", "compare it with the clock"),
    ({"at_hash": "bm90IGl0cyBoYXNoIQ"}, "oidc_not_trusted", "at_hash"),
]


@pytest.mark.parametrize(("claims", "code", "words"), CLAIMS, ids=[next(iter(claims)) for claims, _, _ in CLAIMS])
def test_a_token_that_cannot_be_trusted_opens_nothing(
    platform: Platform, tenant: Tenant, person: Person, claims: dict[str, object], code: str, words: str
) -> None:
    member(platform, tenant, f"{code}@example.com")
    answer = person.sign_in(person.provider.person(f"{code}@example.com", **claims))
    assert answer.status_code == 403
    assert code in answer.text
    assert words in answer.text
    assert sessions.COOKIE not in person.http.cookies
    assert "/console/oidc/start" in answer.text, "the page offers another try"


ADDRESSES: dict[str, tuple[dict[str, object], str | None]] = {
    # claims of the token and of the userinfo endpoint; the address that counts, None if none is verified
    "the token does not say": ({"email_verified": None, "userinfo": {"email": "b@example.com", "email_verified": True}}, "b@example.com"),
    "the token verifies no address": ({"email": None, "userinfo": {"email": "b@example.com", "email_verified": None}}, None),
    "userinfo verifies no address": ({"email_verified": None, "userinfo": {"email": None, "email_verified": True}}, None),
    "the token is complete": ({"userinfo": {"email": "b@example.com", "email_verified": True, "groups": ["x"]}}, "a@example.com"),
    "userinfo withdraws it": ({"email_verified": None, "userinfo": {"email_verified": False}}, None),
}


@pytest.mark.parametrize("where", ADDRESSES)
def test_an_address_and_its_verification_come_from_one_document(provider: Provider, where: str) -> None:
    claims, counts = ADDRESSES[where]
    client, callback = OpenIdProvider(issuer=provider.url, client_id=CLIENT, client_secret=lambda: SECRET), "http://127.0.0.1/cb"
    begun = client.begin(callback)
    code = parse_qs(urlsplit(provider.allow(begun.url, provider.person("a@example.com", **claims))).query)["code"][0]
    if counts is None:
        with pytest.raises(Forbidden) as refused:
            client.redeem(code, nonce=begun.nonce, verifier=begun.verifier, redirect_uri=callback)
        assert refused.value.code in ("email_not_verified", "oidc_not_trusted")
    else:
        assert client.redeem(code, nonce=begun.nonce, verifier=begun.verifier, redirect_uri=callback).email == counts


def test_an_answer_counts_only_in_the_browser_that_asked(platform: Platform, tenant: Tenant, person: Person, api_url: str) -> None:
    member(platform, tenant, "eve@example.com")
    subject = person.provider.person("eve@example.com")
    back = person.provider.allow(person.start(), subject)
    victim = httpx.get(back)
    assert (victim.status_code, "oidc_state_invalid" in victim.text, sessions.COOKIE in victim.cookies) == (403, True, False)
    person.start()
    other_state = person.http.get(back)
    assert "oidc_state_invalid" in other_state.text, "a state of an earlier sign-in"
    forged = person.http.get("/console/oidc/callback", params={"code": "x", "state": ""})
    assert "oidc_state_invalid" in forged.text
    changed = httpx.get(back, cookies={"ft_sign_in": "gAAAAABforged"})
    assert "oidc_state_invalid" in changed.text


@pytest.mark.parametrize(
    "where", ["start?next=/console%00", "callback?code=%00", "callback?state=%00", "callback?error=a&error_description=%00"]
)
def test_a_nul_in_a_parameter_is_refused(api_url: str, where: str) -> None:
    answer = httpx.get(f"{api_url}/console/oidc/{where}")
    assert (answer.status_code, "NUL" in answer.text) == (400, True)


def test_a_code_works_once(platform: Platform, tenant: Tenant, person: Person) -> None:
    member(platform, tenant, "once@example.com")
    back = person.provider.allow(person.start(), person.provider.person("once@example.com"))
    pending = dict(person.http.cookies)
    assert person.http.get(back).status_code == 200
    again = httpx.get(back, cookies=pending)
    assert (again.status_code, "oidc_refused" in again.text) == (403, True)


def test_what_a_browser_keeps_for_one_step_is_nothing_in_another(person: Person) -> None:
    person.start()
    person.http.cookies.set("ft_identity", person.http.cookies["ft_sign_in"])
    assert person.http.get("/console/oidc/choose").headers["location"] == "/console/oidc/start"


def test_a_person_who_declines_is_back_at_the_sign_in(person: Person) -> None:
    answer = person.http.get(person.provider.deny(person.start()))
    assert (answer.status_code, "oidc_refused" in answer.text) == (403, True)


def test_a_wrong_client_secret_is_named_and_a_corrected_file_is_read(platform: Platform, provider: Provider, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("wrong\n")
    settings = replace(platform.settings, oidc_client_secret="", oidc_client_secret_file=file)
    found = identity_provider(settings)
    assert found is not None

    def redeem() -> str:
        begun = found.begin("http://127.0.0.1/cb")
        code = parse_qs(urlsplit(provider.allow(begun.url, provider.person("sec@example.com"))).query)["code"][0]
        return found.redeem(code, nonce=begun.nonce, verifier=begun.verifier, redirect_uri="http://127.0.0.1/cb").email

    with pytest.raises(Exception, match="check FT_OIDC_CLIENT_ID and its secret"):
        redeem()
    file.write_text(f"{SECRET}\n")
    assert redeem() == "sec@example.com"


def test_new_keys_of_the_provider_are_fetched_and_an_outage_is_named() -> None:
    with openid_provider() as first:
        provider = OpenIdProvider(issuer=first.url, client_id=CLIENT, client_secret=lambda: SECRET, retry_s=0.5)
        callback, at = "http://127.0.0.1/cb", int(first.url.rpartition(":")[2])

        def redeem(running: Provider) -> str:
            begun = provider.begin(callback)
            code = parse_qs(urlsplit(running.allow(begun.url, running.person("kim@example.com"))).query)["code"][0]
            return provider.redeem(code, nonce=begun.nonce, verifier=begun.verifier, redirect_uri=callback).email

        assert redeem(first) == "kim@example.com"
        begun = provider.begin(callback)
    with pytest.raises(Exception, match=f"localhost:{at} cannot be reached"):
        provider.redeem("x", nonce=begun.nonce, verifier=begun.verifier, redirect_uri=callback)
    time.sleep(0.6)  # an unknown key is looked up again after as long
    with openid_provider(port=at) as second:
        assert redeem(second) == "kim@example.com"


def test_the_page_says_that_the_provider_cannot_be_reached_and_keys_still_work(
    new_platform: Callable[..., Platform], port: int, serve: Callable[..., str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        nowhere = Provider(f"http://127.0.0.1:{held.getsockname()[1]}")
    platform = with_provider(new_platform, nowhere, port)
    url = serve(create_app(platform))
    for _ in range(2):
        answer = httpx.get(f"{url}/console/oidc/start")
        assert (answer.status_code, "oidc_unavailable" in answer.text, "cannot be reached" in answer.text) == (503, True, True)
    _, key = tenants.create(platform, "t-offline")
    assert httpx.post(f"{url}/console/sign-in", data={"key": key.secret}).status_code == 303


def test_a_provider_that_calls_itself_something_else_is_not_trusted(platform: Platform, provider: Provider) -> None:
    found = identity_provider(replace(platform.settings, oidc_issuer=provider.url.replace("localhost", "127.0.0.1") + "/realm"))
    assert found is not None
    with pytest.raises(Exception, match="cannot be reached: it answered 404"):
        found.begin("http://127.0.0.1/cb")


def test_signing_out_everywhere_ends_sessions_with_and_without_keys(
    platform: Platform, tenant: Tenant, person: Person, api_url: str
) -> None:
    id_ = member(platform, tenant, "many@example.com")
    key = tenants.create_key(platform, tenant.id, name="hers", scopes=["read"], member_id=id_).secret
    by_key = httpx.Client(base_url=api_url)
    assert by_key.post("/console/sign-in", data={"key": key}).status_code == 303
    person.sign_in(person.provider.person("many@example.com"))
    assert Visitor(person.http).post("/console/sign-out-everywhere").status_code == 303
    assert [http.get("/console").status_code for http in (person.http, by_key)] == [303, 303]
    by_key.close()


def test_keys_sign_in_beside_it_unless_it_is_the_only_way(
    platform: Platform, tenant: Tenant, api_key: str, api_url: str, serve: Callable[..., str]
) -> None:
    page = httpx.get(f"{api_url}/console/sign-in").text
    assert "single sign-on" in page
    assert "API key" in page
    with httpx.Client(base_url=api_url) as by_key:
        assert by_key.post("/console/sign-in", data={"key": api_key}).headers["location"] == "/console"
        strict = serve(create_app(replace(platform, settings=replace(platform.settings, console_sign_in="oidc"))))
        alone = httpx.get(f"{strict}/console/sign-in").text
        assert "API key" not in alone
        refused = httpx.post(f"{strict}/console/sign-in", data={"key": api_key})
        assert (refused.status_code, "sign_in_with_oidc" in refused.text) == (403, True)
        assert httpx.get(f"{strict}/console", cookies=dict(by_key.cookies)).status_code == 303, "sessions of keys have ended"
        assert httpx.get(f"{strict}/v1/me", headers={"authorization": f"Bearer {api_key}"}).status_code == 200


def test_an_operator_signs_in_with_a_key_and_is_signed_out_when_it_is_revoked(platform: Platform, api_url: str) -> None:
    made = operators.create(platform.acting_as(HERE), "night shift")
    with httpx.Client(base_url=api_url, headers={"accept": "text/html"}) as http:
        assert http.post("/console/sign-in", data={"key": made.secret}).headers["location"] == "/console/operator"
        assert http.get("/v1/admin/nodes").status_code == 200
        operators.revoke(platform.acting_as(HERE), made.id)
        assert http.get("/v1/admin/nodes").status_code == 401


def test_a_session_belongs_to_one(platform: Platform) -> None:
    now = platform.clock()
    with pytest.raises(sa.exc.IntegrityError), platform.engine.begin() as conn:
        conn.execute(sa.insert(console_sessions).values(sha256="x", created_at=now, expires_at=now))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"FT_OIDC_ISSUER": "http://login.example.com", "FT_OIDC_CLIENT_ID": "a"}, "https"),
        ({"FT_OIDC_ISSUER": "https://login.example.com"}, "FT_OIDC_CLIENT_ID"),
        ({"FT_CONSOLE_SIGN_IN": "oidc"}, "FT_OIDC_ISSUER"),
        ({"FT_CONSOLE_SIGN_IN": "password"}, "use any or oidc"),
    ],
)
def test_settings_that_would_lock_everyone_out_are_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(env)
