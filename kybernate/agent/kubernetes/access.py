"""Where the cluster's API server is, and as whom the agent calls it: a service account's token, or a kubeconfig file.

Files are read again with each connection, and a token with each request: kubelet exchanges a service account's token
every hour, and a cluster its authority.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kybernate.node.failure import Invalid

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MOST_BYTES: Final = 1 << 20  # of a file that is read here


@dataclass(frozen=True)
class Access:
    """An API server by its URL, and the agent's identity there.

    `ca` is PEM, or a file with it; without one, the system's authorities count. Of `token`, `token_file` and the pair
    of `certificate` and `key` (each PEM, or a file) one is enough.
    """

    server: str
    ca: Path | bytes | None = None
    token: str = ""
    token_file: Path | None = None
    certificate: Path | bytes | None = None
    key: Path | bytes | None = None

    def bearer(self) -> str:
        """Return the token as it is now, "" where the agent has a certificate. Raises Invalid."""
        return _read(self.token_file).decode(errors="replace").strip() if self.token_file else self.token

    def tls(self) -> ssl.SSLContext:
        """Return what TLS needs, as its files are now. Raises Invalid."""
        try:
            authorities = _content(self.ca).decode() if self.ca is not None else None
            context = ssl.create_default_context(cadata=authorities)
            if self.certificate is not None and self.key is not None:
                with _Pair(_content(self.certificate), _content(self.key)) as place:
                    context.load_cert_chain(place)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise _unusable(f"the certificates for {self.server} cannot be used: {error}") from error
        return context


class _Pair:
    """A certificate and its key as a file in memory, since OpenSSL takes them from a file alone."""

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self._descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        os.write(self._descriptor, certificate + b"\n" + key)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def access_of(
    kubeconfig: Path | None, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> Access | None:
    """Return how the agent reaches the API server: by the file, or as the service account of its own pod.

    None where neither is there. Raises Invalid.
    """
    if kubeconfig is not None:
        return of_kubeconfig(kubeconfig)
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        return None
    address = f"[{host}]" if ":" in host else host
    return Access(f"https://{address}:{port}", account / "ca.crt", token_file=account / "token")


def of_kubeconfig(path: Path) -> Access:
    """Return what the file's current context names. Raises Invalid.

    Programs that a file names (`exec`) are not executed: the agent is root.
    """
    import yaml  # an agent outside of a cluster needs none

    try:
        document = yaml.safe_load(_read(path))
        context = _named(document, "contexts", "context", str(document["current-context"]))
        cluster = _named(document, "clusters", "cluster", str(context["cluster"]))
        user = _named(document, "users", "user", str(context["user"]))
        found = Access(
            str(cluster["server"]),
            _pem(cluster, "certificate-authority", path),
            str(user.get("token", "")),
            _beside(user.get("tokenFile"), path),
            _pem(user, "client-certificate", path),
            _pem(user, "client-key", path),
        )
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, binascii.Error, RecursionError) as error:
        raise _unusable(f"{path} is not a usable kubeconfig file: {error!r}") from error
    if not found.server.startswith("https://"):
        raise _unusable(f"{path}: the server {found.server!r} has no https:// URL")
    if not (found.token or found.token_file or (found.certificate and found.key)):
        raise _unusable(f"{path}: its user has neither a token nor a client certificate with its key")
    return found


def _named(document: Mapping[str, Any], entries: str, kind: str, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = next((one[kind] for one in document[entries] if one["name"] == name), None)
    if found is None:
        raise KeyError(f"{kind} {name}")
    return found


def _pem(entry: Mapping[str, Any], name: str, path: Path) -> Path | bytes | None:
    inline = entry.get(f"{name}-data")
    return base64.b64decode(str(inline), validate=True) if inline else _beside(entry.get(name), path)


def _beside(name: object, path: Path) -> Path | None:
    """Return the place of a file that a kubeconfig names, which may be relative to the kubeconfig's own."""
    return path.parent / str(name) if name else None


def _content(what: Path | bytes) -> bytes:
    return what if isinstance(what, bytes) else _read(what)


def _unusable(why: str) -> Invalid:
    """The API server cannot be called with what is configured. The agent works without it."""
    advice = "correct `kubernetes.kubeconfig` in agent.toml, or the file, then `systemctl restart kybernate-agent`"
    return Invalid(why, advice=advice)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MOST_BYTES)
    except OSError as error:
        raise _unusable(f"{path}: {error.strerror}") from error
