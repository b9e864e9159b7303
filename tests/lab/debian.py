"""Reads a Debian root's own package database: which packages a package needs, and which files they brought."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def closure(root: Path, wanted: tuple[str, ...], *, without: frozenset[str]) -> set[str]:
    """Return `wanted` and every installed package that these need, `without` some that only installing needs."""
    needs = dict(_installed(root))
    found: set[str] = set()
    queue = list(wanted)
    while queue:
        package = queue.pop()
        if package in needs and package not in found | without:
            found.add(package)
            queue += needs[package]
    return found


def _installed(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each installed package, and each name it provides, with the names of what it depends on."""
    for stanza in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(re.findall(r"(?m)^(Package|Provides|Depends|Pre-Depends): (.*)$", stanza))
        if "Package" in fields:
            depends = ",".join(fields.get(key, "") for key in ("Depends", "Pre-Depends"))
            yield fields["Package"], _names(depends)
            for provided in _names(fields.get("Provides", "")):
                yield provided, [fields["Package"]]


def _names(relation: str) -> list[str]:
    """Return the package names of a dependency field, alternatives included; versions and architectures dropped."""
    return re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]*)", relation)


def files(root: Path, packages: set[str]) -> Iterator[str]:
    """Yield the paths, relative to the root, of what `packages` brought and is there."""
    info = root / "var/lib/dpkg/info"
    lists = [path for path in info.glob("*.list") if path.stem.partition(":")[0] in packages]
    paths = {line.strip("/") for path in lists for line in path.read_text().splitlines()}
    for path in sorted(paths - {".", ""}):
        if (root / path).is_symlink() or (root / path).exists():
            yield path
