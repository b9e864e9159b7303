"""The agents that a client knows by name, as `kubectl` has contexts.

    current = "node-7"                       # of commands without --agent
    ca = "/etc/kybernate/pki/ca.crt"         # TLS of every context that says nothing else, and of HOST:PORT
    certificate = "/etc/kybernate/pki/admin.crt"
    key = "/etc/kybernate/pki/admin.key"

    [contexts.node-7]
    address = "node-7:7443"

The system's file is read first, then the user's, which adds to it and has precedence. A relative path of a file is
relative to the directory of the file that has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kybernate.node.failure import Failure, Missing

LOCAL: Final = "local"  # names this node, whichever context is the current one
SYSTEM: Final = Path("/etc/kybernate/client.toml")
TLS_FILES: Final = ("ca", "certificate", "key")
KEYS: Final = frozenset({"address", *TLS_FILES, "server_name"})
MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Tls:
    """Files in PEM form: the authority that signed the agent's certificate, and the caller's certificate and key.

    `server_name` replaces the host's name where the agent's certificate has another one.
    """

    ca: Path
    certificate: Path
    key: Path
    server_name: str = ""


@dataclass(frozen=True)
class Context:
    """An agent with a name. `file` is where it was found."""

    name: str
    address: str
    file: Path
    tls: Tls | None = None


@dataclass(frozen=True)
class Contexts:
    """All contexts. `current` is the name of the one that is used without a choice, "" for this node."""

    by_name: Mapping[str, Context] = field(default_factory=dict)
    current: str = ""
    tls: Tls | None = None  # for an address that is no context's

    def named(self, name: str) -> Context:
        """Return a context. Raises Missing."""
        if name not in self.by_name:
            raise Missing(f"no context has the name {name!r}", advice="`kybernate context ls` lists the contexts")
        return self.by_name[name]


def user_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's own file, whether it exists or not."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "kybernate" / "client.toml"


def load(files: Iterable[Path] = ()) -> Contexts:
    """Return the contexts of the system's file and the user's. Raises Failure."""
    documents = [(path, _document(path)) for path in tuple(files) or (SYSTEM, user_file()) if _is_there(path)]
    shared: dict[str, Any] = {}
    named: dict[str, tuple[Path, dict[str, Any]]] = {}
    current = ""
    for path, document in documents:
        shared |= {key: _beside(path, document[key]) for key in TLS_FILES if key in document}
        current = document.get("current", current)
        for name, entry in document.get("contexts", {}).items():
            named[name] = path, entry
    found = {name: _context(name, path, entry, shared) for name, (path, entry) in named.items()}
    if current == LOCAL:
        current = ""
    return Contexts(found, current, _tls(shared))


def _is_there(path: Path) -> bool:
    """Return whether there is a file that this user may look for: HOME may be another user's, as under setpriv."""
    try:
        return path.is_file()
    except OSError:
        return False


def use(name: str, file: Path | None = None) -> Path:
    """Make a context the current one in the user's file, and return the file. Raises Missing and Failure."""
    import tomlkit  # which keeps comments; no other call needs it

    if name != LOCAL:
        load().named(name)
    path = file or user_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        document = tomlkit.parse(path.read_text()) if path.exists() else tomlkit.document()
        document["current"] = name
        written = path.with_name(f"{path.name}.new")
        written.write_text(tomlkit.dumps(document))
        written.replace(path)
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be changed: {error}", state="the current context is as it was") from error
    return path


def _document(path: Path) -> dict[str, Any]:
    import tomllib  # most calls have no file of contexts

    try:
        if path.stat().st_size > MOST_BYTES:
            raise Failure(f"{path} is larger than {MOST_BYTES} bytes")
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read: {error}") from error
    contexts = document.get("contexts", {})
    texts = [document.get(key, "") for key in ("current", *TLS_FILES)]
    if not isinstance(contexts, dict) or not all(isinstance(text, str) for text in texts):
        raise Failure(f"{path}: current, ca, certificate and key are texts, and contexts is a table")
    if unknown := sorted(set(document) - {"current", "contexts", *TLS_FILES}):
        raise Failure(f"{path} has unknown keys: {', '.join(unknown)}")
    return document


def _context(name: str, path: Path, entry: Any, shared: Mapping[str, Path]) -> Context:
    known = isinstance(entry, dict) and set(entry) <= KEYS and all(isinstance(value, str) for value in entry.values())
    if not known or not entry.get("address"):
        raise Failure(f"{path}: context {name!r} needs an address, and may have {', '.join(sorted(KEYS))}")
    if name == LOCAL or not name or "/" in name or ":" in name:
        raise Failure(f"{path}: {name!r} cannot be the name of a context")
    files = {**shared, **{key: _beside(path, entry[key]) for key in TLS_FILES if key in entry}}
    return Context(name, entry["address"], path, _tls(files, entry.get("server_name", "")))


def _beside(file: Path, name: str) -> Path:
    return file.parent / Path(name).expanduser()


def _tls(files: Mapping[str, Path], server_name: str = "") -> Tls | None:
    if any(key not in files for key in TLS_FILES):
        return None
    return Tls(files["ca"], files["certificate"], files["key"], server_name)
