"""A CA of the tests, and what it signs."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """Signs certificates with names (SAN): with `://` they are URIs, else DNS names."""

    def __init__(self, name: str = "CA of the tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key(), timedelta(days=1))
        self.certificate = _pem(builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256()))

    def issue(self, *names: str, lasts: timedelta = timedelta(days=1)) -> tuple[bytes, bytes]:
        """Return key and certificate as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator")])  # means nothing
        builder = self._builder(subject, key.public_key(), lasts)
        if names:
            general = [x509.UniformResourceIdentifier(n) if "://" in n else x509.DNSName(n) for n in names]
            builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private, _pem(builder.sign(self._key, hashes.SHA256()))

    def client(self, *names: str, trusts: Authority | None = None) -> grpc.ChannelCredentials:
        """Return what a client with these names presents; it trusts servers of this CA or of `trusts`."""
        key, certificate = self.issue(*names)
        return grpc.ssl_channel_credentials((trusts or self).certificate, key, certificate)

    def write(self, directory: Path, *names: str) -> None:
        """Write the files that `tls` names: `certificate`, `key`, and this CA as that of the clients."""
        key, certificate = self.issue(*names)
        for name, content in (("certificate", certificate), ("key", key), ("client_ca", self.certificate)):
            fresh = directory / f"{name}.new"
            fresh.touch(mode=0o600)
            fresh.write_bytes(content)
            os.replace(fresh, directory / name)  # noqa: PTH105

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lasts: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + lasts)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
