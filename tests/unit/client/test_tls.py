"""Agents over TLS that are not who they should be, or do not want this client: in words, within seconds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from kybernate.client import Agent, AgentUnreachable, Tls
from tests.fakes.agent import FakeAgent
from tests.unit.agent.access.authority import Authority

NAME, OTHER = "node-1.example.org", "node-2.example.org"
Issued = tuple[bytes, bytes]
EXPIRED = timedelta(days=-1)


@pytest.mark.parametrize(
    ("agents", "clients", "refused", "says"),
    [
        (lambda ca: ca.issue(OTHER), lambda ca: ca.issue("a"), False, "Hostname Verification Check failed"),
        (lambda ca: ca.issue(NAME, lasts=EXPIRED), lambda ca: ca.issue("a"), False, "certificate has expired"),
        (lambda ca: Authority("another").issue(NAME), lambda ca: ca.issue("a"), False, "CERTIFICATE_VERIFY_FAILED"),
        (lambda ca: ca.issue(NAME), lambda ca: ca.issue("a", lasts=EXPIRED), True, "Socket closed"),
        (lambda ca: ca.issue(NAME), lambda ca: Authority("another").issue("a"), True, "Socket closed"),
    ],
    ids=["another name", "an expired agent", "another CA", "an expired client", "a client of another CA"],
)
def test_failure_of_tls_is_said_in_words(
    fake: FakeAgent,
    tmp_path: Path,
    agents: Callable[[Authority], Issued],
    clients: Callable[[Authority], Issued],
    refused: bool,
    says: str,
) -> None:
    ca = Authority()
    key, certificate = clients(ca)
    for name, content in (("ca", ca.certificate), ("key", key), ("certificate", certificate)):
        (tmp_path / name).write_bytes(content)
    port = fake.serve_tls(agents(ca), ca.certificate)
    tls = Tls(ca=tmp_path / "ca", certificate=tmp_path / "certificate", key=tmp_path / "key", server_name=NAME)
    with Agent(f"127.0.0.1:{port}", tls=tls) as agent, pytest.raises(AgentUnreachable, match=says) as error:
        agent.node()
    assert f"no agent answers on 127.0.0.1:{port}" in str(error.value)
    assert ("the agent does not accept this client" in error.value.advice) == refused
