"""The identities of a cluster: certificates of an authority of its own, and kubeconfig files that hold them."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BEFORE, AFTER = datetime.timedelta(hours=1), datetime.timedelta(days=1)
KEY_USAGES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
              "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, stem: Path) -> None:
        """Write STEM.crt, and STEM.key for root alone."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_name(f"{stem.name}.crt").write_bytes(self.certificate)
        write_secret(stem.with_name(f"{stem.name}.key"), self.key)


class Authority:
    """A certificate authority that signs whatever it is asked to."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name, ())
        certificate = _certificate(self._name, self._key.public_key(), self._name).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        usage = _key_usage("digital_signature", "key_cert_sign", "crl_sign")
        signed = self._sign(certificate.add_extension(usage, critical=True))
        self.pair = Pair(signed, key_pem(self._key))

    def client(self, name: str, *groups: str) -> Pair:
        """Return the identity of a client: Kubernetes reads its user from `name` and its groups from `groups`."""
        return self._issue(name, groups, (), ExtendedKeyUsageOID.CLIENT_AUTH)

    def server(self, name: str, hosts: Sequence[str]) -> Pair:
        """Return the identity of a server that clients reach by `hosts`, which are names or addresses."""
        return self._issue(name, (), hosts, ExtendedKeyUsageOID.SERVER_AUTH)

    def _issue(self, name: str, groups: Sequence[str], hosts: Sequence[str], usage: x509.ObjectIdentifier) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(_subject(name, groups), key.public_key(), self._name)
        certificate = certificate.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        certificate = certificate.add_extension(_key_usage("digital_signature"), critical=True)
        certificate = certificate.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            certificate = certificate.add_extension(names, critical=False)
        return Pair(self._sign(certificate), key_pem(key))

    def _sign(self, certificate: x509.CertificateBuilder) -> bytes:
        """Sign a certificate that names this authority's key, which strict clients want."""
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = certificate.add_extension(own, critical=False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_key_pair(stem: Path) -> None:
    """Write a new key to STEM.key and its public half to STEM.pub, as the API server signs service accounts with."""
    key = ec.generate_private_key(ec.SECP256R1())
    write_secret(stem.with_name(f"{stem.name}.key"), key_pem(key))
    stem.with_name(f"{stem.name}.pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def write_kubeconfig(path: Path, server: str, authority: bytes, pair: Pair, *, namespace: str = "default") -> None:
    """Write a kubeconfig file that holds all it needs: JSON, which is YAML as well."""
    text = json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": server, "certificate-authority-data": _base64(authority)}}],
        "users": [{"name": path.stem, "user": {
            "client-certificate-data": _base64(pair.certificate), "client-key-data": _base64(pair.key),
        }}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": path.stem, "namespace": namespace}}],
    }, indent=2)  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_secret(path, text.encode())


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that no other user can read."""
    path.touch(mode=0o600)
    path.write_bytes(data)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _subject(name: str, groups: Sequence[str]) -> x509.Name:
    """Return a subject whose groups are organisations. Source: Kubernetes' "Authenticating", X.509."""
    of_groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*of_groups, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.not_valid_before(now - BEFORE).not_valid_after(now + AFTER)


def _key_usage(*wanted: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in wanted for name in KEY_USAGES})
