"""What must change in containerd's configuration so that pods can name the handler `kybernate`. Pure.

A configuration is a main file and the files that it imports. Where a drop-in file is merged into the others
(containerd 2.x, configuration of version 3 or newer), ours is one. Elsewhere, the table goes into a file that exists:
containerd 1.7 lets an imported file replace all settings of a plugin, and 2.x fills what a drop-in of version 3 does
not say with defaults where the main file is of version 2. Comments and order of all files stay.

Sources: containerd's docs/cri/config.md of 1.7 and 2.1; containerd-config.toml(5) of 2.4.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.exceptions import ParseError, TOMLKitError

from kybernate.node.containerd_facts import ONE_PLUGIN, SPLIT, handlers
from kybernate.node.failure import Failure

HANDLER: Final = "kybernate"
DROP_IN: Final = f"conf.d/{HANDLER}.toml"  # next to the main file
MERGES: Final = (2, 0)  # the first containerd that merges drop-in files
FORMS: Final = (2, 4)  # the oldest and the newest version of a configuration that is understood here
GENERATED: Final = {  # by what a path of a configuration is known that another program writes at each of its starts
    "/k3s/": "k3s writes it: put the table into config-v3.toml.tmpl (or config.toml.tmpl) next to it",
    "/rke2/": "RKE2 writes it: put the table into config-v3.toml.tmpl (or config.toml.tmpl) next to it",
    "/k0s/": "k0s writes it: put the drop-in file into /etc/k0s/containerd.d",
    "/microk8s/": "MicroK8s writes it: put the table into containerd-template.toml next to it",
}


def _unusable(message: str, *, advice: str) -> Failure:
    """Return the error of a configuration that cannot be changed by this program."""
    return Failure(message, state="nothing was changed", advice=advice)


@dataclass(frozen=True)
class Files:
    """A configuration as it lies on disk. `texts` has what is there, in the order in which containerd reads it.

    `main` need not be among them: without it, containerd has its defaults.
    """

    main: Path
    texts: Mapping[Path, str]


def changes(files: Files, release: tuple[int, ...], shim: str) -> dict[Path, str]:
    """Return the new text of each file that must change; empty where the handler is configured already.

    `release` is containerd's, `shim` the path of the program that it executes. Raises Failure.
    """
    for mark, advice in GENERATED.items():
        if mark in str(files.main):
            raise _unusable(f"{files.main} would lose a change at its program's next start", advice=advice)
    documents = {path: _parsed(path, text) for path, text in files.texts.items()}
    for path, document in documents.items():
        _require_form(path, document, release)
    main = documents.get(files.main, tomlkit.document())
    if files.main not in documents:
        main["version"] = _newest_form(release)
    form = _form(main)
    if owner := _last(path for path, document in documents.items() if HANDLER in handlers(document)):
        changed = {owner: documents[owner]}
        _configure(documents[owner], shim)
    elif release >= MERGES and form > FORMS[0]:
        drop_in = files.main.parent / DROP_IN
        added = tomlkit.document()
        added["version"] = 3  # the newer releases migrate it when they read it
        _configure(added, shim)
        changed = {drop_in: added}
        if not any(fnmatch.fnmatch(str(drop_in), pattern) for pattern in _imports(main, files.main)):
            changed[files.main] = _importing(main, drop_in)
    else:
        host = _last(path for path, document in documents.items() if _plugin(_form(document)) in _plugins(document))
        document = documents.get(host or files.main, main)
        _configure(document, shim)
        changed = {host or files.main: document}
    texts = {path: tomlkit.dumps(document) for path, document in changed.items()}
    return {path: text for path, text in texts.items() if text != files.texts.get(path)}


def imported(main: str, at: Path) -> list[str]:
    """Return the patterns of the files that a main file at `at` imports, absolute. Raises Failure."""
    return _imports(_parsed(at, main), at)


def difference(files: Files, changed: Mapping[Path, str]) -> str:
    """Return the changes as `diff -u` shows them."""
    lines: list[str] = []
    for path, text in changed.items():
        old = files.texts.get(path)
        name = str(path) if old is not None else "/dev/null"
        lines += difflib.unified_diff((old or "").splitlines(), text.splitlines(), name, str(path), lineterm="")
    return "\n".join(lines)


def strayed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ between two dumps of a configuration, without those that were meant to.

    What was meant is the handler, and the imports. A name is the way to a setting, its parts joined by " > ".
    """
    meant = [("plugins", plugin, "containerd", "runtimes", HANDLER) for plugin in (ONE_PLUGIN, SPLIT)] + [("imports",)]
    old, new = dict(_settings(before, ())), dict(_settings(after, ()))
    different = {path for path in {*old, *new} if old.get(path) != new.get(path)}
    return [" > ".join(path) for path in sorted(different) if not any(path[: len(one)] == one for one in meant)]


def handler(dumped: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what containerd makes of our handler, empty where it has none."""
    found: Mapping[str, Any] = handlers(dumped).get(HANDLER, {})
    return found


def _settings(table: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, (*at, key))
        else:
            yield (*at, key), value


def _parsed(path: Path, text: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except ParseError as error:
        raise _unusable(
            f"{path} is not valid TOML: {error}", advice="correct it: containerd refuses it as well"
        ) from error


def _require_form(path: Path, document: Mapping[str, Any], release: tuple[int, ...]) -> None:
    form = _form(document)
    if not FORMS[0] <= form <= FORMS[1]:
        raise _unusable(
            f"{path} is of version {form}; versions {FORMS[0]} to {FORMS[1]} can be changed",
            advice=f"`containerd config migrate` prints it in the newest version that containerd {release[0]} knows",
        )


def _form(document: Mapping[str, Any]) -> int:
    found = document.get("version", 1)
    return int(found) if isinstance(found, int) else 0


def _newest_form(release: tuple[int, ...]) -> int:
    """Return the version of a configuration that all containerds of this generation read."""
    return 3 if release >= MERGES else 2


def _plugin(form: int) -> str:
    return ONE_PLUGIN if form == FORMS[0] else SPLIT


def _plugins(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found = document.get("plugins", {})
    return found if isinstance(found, Mapping) else {}


def _configure(document: tomlkit.TOMLDocument, shim: str) -> None:
    """Write the handler's table; what else is in it stays, such as options. Raises Failure."""
    at: MutableMapping[str, Any] = document
    try:
        for key in ("plugins", _plugin(_form(document)), "containerd", "runtimes"):
            if key not in at:
                at[key] = tomlkit.table(is_super_table=True)
            at = at[key]
        if HANDLER not in at:
            at[HANDLER] = tomlkit.table()
        wanted = {
            "runtime_type": "io.containerd.runc.v2",
            "runtime_path": shim,
            "pod_annotations": ["kybernate.io/*"],
            "container_annotations": ["kybernate.io/*", "kyb.ai/*"],
        }
        for key, value in wanted.items():
            if not _serves(at[HANDLER].get(key), value):
                at[HANDLER][key] = value
    except (TOMLKitError, TypeError, AttributeError) as error:
        raise _unusable(
            f"the table of CRI's runtimes cannot be extended: {error}",
            advice="add the table of packaging/containerd by hand",
        ) from error


def _serves(value: Any, wanted: Any) -> bool:
    """Return whether a setting need not change. An administrator may let more annotations pass."""
    return set(wanted) <= set(value or ()) if isinstance(wanted, list) else value == wanted


def _imports(document: Mapping[str, Any], at: Path) -> list[str]:
    """Return the patterns of imports, absolute: relative ones are relative to the file that has them."""
    found = document.get("imports", [])
    return [str(at.parent / str(one)) for one in found] if isinstance(found, list) else []


def _importing(main: tomlkit.TOMLDocument, path: Path) -> tomlkit.TOMLDocument:
    """Return the main file with an import of the directory of `path`."""
    pattern = str(path.parent / "*.toml")
    if isinstance(main.get("imports"), list):
        main["imports"].append(pattern)
        return main
    return tomlkit.parse(tomlkit.dumps({"imports": [pattern]}) + tomlkit.dumps(main))  # above the first table


def _last(paths: Iterator[Path]) -> Path | None:
    return next(reversed(list(paths)), None)
