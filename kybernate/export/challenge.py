"""How a request to an image registry is authenticated: basic, or a bearer token of the server that the registry names.

Credentials go to the registry's own origin, and to the token server that it names over TLS; a redirect and an upload's
address on another host get none.
Source: distribution specification; distribution's "Token Authentication Specification".
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import httpx

from kybernate.export.answers import document_of
from kybernate.export.credentials import Credentials
from kybernate.node.failure import Failure

PARAMETER = re.compile(r'([a-zA-Z_]+)=(?:"([^"]*)"|([^",\s]+))')
CLIENT = "kybernate"
MOST_TOKEN = 64 << 10


@dataclass(frozen=True)
class Challenge:
    """What a registry asks for: the scheme in lower case, and its parameters."""

    scheme: str
    parameters: Mapping[str, str]


def read_challenge(header: str) -> Challenge | None:
    """Return what a `WWW-Authenticate` header asks for, None where that is nothing we know."""
    scheme, _, rest = header.strip().partition(" ")
    if scheme.lower() not in ("basic", "bearer"):
        return None
    found = {key.lower(): quoted or bare for key, quoted, bare in PARAMETER.findall(rest)}
    return Challenge(scheme.lower(), found)


class RegistryAuth(httpx.Auth):
    """Adds what the registry at `origin` asks for. Used by several threads."""

    def __init__(self, origin: httpx.URL, credentials: Credentials, scopes: tuple[str, ...]) -> None:
        self._origin, self._credentials, self._scopes = origin, credentials, scopes
        self._header = ""
        self._lock = threading.Lock()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request, and again with what the answer asks for."""
        if not self._is_own(request.url):
            yield request
            return
        used = self._header
        response = yield _with(request, used)
        if response.status_code != httpx.codes.UNAUTHORIZED or not self._is_own(response.request.url):
            return
        challenge = read_challenge(response.headers.get("www-authenticate", ""))
        if challenge is None:
            return
        if self._header == used:  # no other thread has a newer one
            header = yield from self._answer(challenge)
            with self._lock:
                self._header = header
        if self._header:
            yield _with(request, self._header)

    def _answer(self, challenge: Challenge) -> Generator[httpx.Request, httpx.Response, str]:
        if challenge.scheme == "basic":
            user, password = self._credentials.user, self._credentials.password
            basic = next(httpx.BasicAuth(user, password).auth_flow(httpx.Request("GET", self._origin)))
            return str(basic.headers["Authorization"]) if user else ""
        response = yield self._token_request(challenge)
        return f"Bearer {_token(response)}"

    def _token_request(self, challenge: Challenge) -> httpx.Request:
        try:
            realm = httpx.URL(challenge.parameters.get("realm", ""))
        except httpx.InvalidURL as error:
            raise Failure(f"{self._origin.host} names no address for tokens: {error}") from error
        if not realm.host or (realm.scheme != "https" and self._origin.scheme == "https"):
            raise Failure(f"{self._origin.host} names {str(realm)!r} for tokens, which is not https")
        service = challenge.parameters.get("service", "")
        scopes = [one for one in dict.fromkeys((*self._scopes, challenge.parameters.get("scope", ""))) if one]
        if self._credentials.identity:
            form = {"grant_type": "refresh_token", "service": service, "client_id": CLIENT, "scope": " ".join(scopes)}
            return httpx.Request("POST", realm, data={**form, "refresh_token": self._credentials.identity})
        query = {"service": service, "scope": scopes}
        request = httpx.Request("GET", realm.copy_merge_params(query), headers={"Accept": "application/json"})
        if self._credentials.user:
            basic = httpx.BasicAuth(self._credentials.user, self._credentials.password)
            request = next(basic.auth_flow(request))
        return request

    def _is_own(self, url: httpx.URL) -> bool:
        return (url.scheme, url.host, url.port) == (self._origin.scheme, self._origin.host, self._origin.port)


def _with(request: httpx.Request, header: str) -> httpx.Request:
    request.headers.pop("Authorization", None)
    if header:
        request.headers["Authorization"] = header
    return request


def _token(response: httpx.Response) -> str:
    if response.status_code != httpx.codes.OK:
        raise Failure(
            f"{response.request.url.host} gives no token: HTTP {response.status_code}",
            advice="`docker login` writes credentials; --credentials names another file",
        )
    try:
        document = document_of(response)
        token = document.get("token") or document.get("access_token")
    except (ValueError, AttributeError) as error:
        raise Failure(f"{response.request.url.host} gives no token that can be read") from error
    if not isinstance(token, str) or not token.isprintable() or len(token) > MOST_TOKEN:
        raise Failure(f"{response.request.url.host} gives no token that can be read")
    return token
