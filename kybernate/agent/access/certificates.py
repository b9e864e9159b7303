"""Mutual TLS: the agent's certificate, the clients' CAs, and the names in a client's certificate.

OpenSSL decides which certificate is valid, `roles` what its names may do. The files are looked at with each connection:
one that has changed is in use from then on, and connections that were made under the older ones end.
"""

from __future__ import annotations

import os
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kybernate.agent.access.roles import Name
from kybernate.agent.settings import Tls
from kybernate.node.failure import Failure
from kybernate_shim.linux.private_files import NO_OTHERS

KINDS: Final = ("URI", "DNS")
GRPC: Final = "h2"  # the protocols that a client may choose in the handshake (ALPN)
HTTP: Final = "http/1.1"

Stamp = tuple[tuple[int, int, int, int], ...]

CERTIFICATES_UNUSABLE_ADVICE: Final = (
    "correct `tls.certificate`, `tls.key` and `tls.client_ca` in agent.toml, or the files"
)


@dataclass
class Certificates:
    """What TLS connections begin with. `generation` rises with each change of the files."""

    generation: int = 0
    _context: ssl.SSLContext | None = field(default=None, repr=False)
    _stamp: tuple[Tls, Stamp] | None = None

    def context(self, tls: Tls) -> ssl.SSLContext:
        """Return the context as the files are now. Raises Failure."""
        paths = [path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None]
        try:
            stamp = tls, tuple(map(_stamp, paths))
            if self._context is None or stamp != self._stamp:
                self._context = _loaded(tls)
                self._stamp = stamp
                self.generation += 1
        except (OSError, ssl.SSLError) as error:
            raise Failure(f"certificates cannot be used: {error}", advice=CERTIFICATES_UNUSABLE_ADVICE) from error
        return self._context


def names_of(certificate: Mapping[str, Any]) -> tuple[Name, ...]:
    """Return URIs and DNS names of a certificate as `ssl` describes it, in its order."""
    return tuple(Name(kind, value) for kind, value in certificate.get("subjectAltName", ()) if kind in KINDS)


def is_over(certificate: Mapping[str, Any]) -> bool:
    """Return whether the certificate has expired: a connection may live longer."""
    return ssl.cert_time_to_seconds(certificate["notAfter"]) < time.time()


def _loaded(tls: Tls) -> ssl.SSLContext:
    assert tls.certificate is not None
    assert tls.key is not None
    status = tls.key.stat()
    if stat.S_IMODE(status.st_mode) & NO_OTHERS or status.st_uid not in (0, os.geteuid()):
        raise Failure(
            f"the key {tls.key} can be read by other users", advice=f"chown root {tls.key}; chmod 0600 {tls.key}"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tls.certificate, tls.key)
    context.load_verify_locations(tls.client_ca)
    context.set_alpn_protocols([GRPC, HTTP])
    return context


def _stamp(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
