"""Contexts: two files, of which the user's has precedence, and what an address or a name means by them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kybernate.client import contexts
from kybernate.client.target import DEFAULT_SOCKET, target_of
from kybernate.node.failure import Failure, Missing
from tests.documentation import block

TLS = 'ca = "ca.crt"\ncertificate = "me.crt"\nkey = "me.key"\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the system's file and the user's; neither exists."""
    system = tmp_path / "system.toml"
    monkeypatch.setattr(contexts, "SYSTEM", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    user = tmp_path / "home" / "kybernate" / "client.toml"
    user.parent.mkdir(parents=True)
    return system, user


def test_without_files_an_address_is_the_nodes_own(files: tuple[Path, Path]) -> None:
    assert contexts.load().by_name == {}
    for words in ("", "local"):
        assert target_of(words, environment={}).address == f"unix:{DEFAULT_SOCKET}"
    with pytest.raises(Missing, match="'node-7'"):
        target_of("node-7")


def test_example_of_the_manual_is_read(files: tuple[Path, Path]) -> None:
    system, _ = files
    system.write_text(block("docs/client.md", "contexts").text)
    known = contexts.load()
    assert known.current == "node-7"
    target = target_of("node-8")
    assert target.address == "10.0.0.8:7443"
    assert target.tls is not None
    assert (str(target.tls.ca), target.tls.server_name) == ("/etc/kybernate/pki/ca.crt", "node-8.example.org")


def test_users_file_adds_and_has_precedence(files: tuple[Path, Path]) -> None:
    system, user = files
    system.write_text(f'{TLS}current = "a"\n[contexts.a]\naddress = "a:1"\n[contexts.b]\naddress = "b:1"\n')
    user.write_text(
        'current = "b"\nkey = "own.key"\n[contexts.b]\naddress = "b:2"\n[contexts.c]\naddress = "/c.sock"\n'
    )
    known = contexts.load()
    assert {name: one.address for name, one in known.by_name.items()} == {"a": "a:1", "b": "b:2", "c": "/c.sock"}
    assert (known.current, known.named("b").file) == ("b", user)
    tls = known.named("a").tls
    assert tls is not None
    assert (tls.ca, tls.key) == (system.parent / "ca.crt", user.parent / "own.key")
    assert target_of("c").address == "unix:/c.sock"


def test_address_without_a_context_has_the_files_certificates(files: tuple[Path, Path]) -> None:
    with pytest.raises(Failure, match="n:1 needs TLS"):
        target_of("n:1")
    files[0].write_text(TLS)
    assert target_of("n:1").tls is not None


def test_chosen_context_is_written_with_all_else_as_it_was(files: tuple[Path, Path]) -> None:
    system, user = files
    system.write_text('[contexts.a]\naddress = "a:1"\n')
    user.write_text('# mine\n[contexts.b]\naddress = "b:1"  # the other\n')
    assert contexts.use("a") == user
    assert contexts.load().current == "a"
    assert "# the other" in user.read_text()
    contexts.use("local")
    assert contexts.load().current == ""
    with pytest.raises(Missing, match="no context has the name"):
        contexts.use("z")
    shutil.rmtree(user.parent)
    contexts.use("a")
    assert contexts.load().current == "a"


@pytest.mark.parametrize(
    "text",
    [
        "[", "current = 1", "contexts = 1", "other = 1", "[contexts.a]", "[contexts.a]\naddress = 1",
        '[contexts.a]\naddress = "a:1"\ntoken = "x"', '[contexts.local]\naddress = "a:1"',
        '[contexts."a/b"]\naddress = "a:1"', "#" * (contexts.MOST_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_file_of_contexts_is_refused(files: tuple[Path, Path], text: str) -> None:
    files[1].write_text(text)
    with pytest.raises(Failure):
        contexts.load()
