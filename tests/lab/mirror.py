"""Finds the Debian mirror that this machine itself uses, in its apt configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.lab.failure import LabFailed

OVERRIDE = "KYBERNATE_LAB_MIRROR"
APT = Path("/etc/apt")
MIRROR_FILE = ("mirror+file:", "mirror:file:")


def mirror() -> str:
    """Return the URI of a Debian archive: the override's, else the one that this Debian machine installs from."""
    if found := os.environ.get(OVERRIDE):
        return found
    release = _os_release()
    if release.get("ID") == "debian":
        suites = {release.get("VERSION_CODENAME", ""), "sid", "unstable", "testing", "stable"}
        for uri, suite, components in _sources(APT):
            if suite in suites and "main" in components:
                return uri
    raise LabFailed(
        "no Debian mirror found in this machine's apt configuration; "
        f"set {OVERRIDE} to the URI of one (the directory that holds dists/ and pool/)"
    )


def _os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def _sources(apt: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield URI, suite and components of every enabled binary source reached by HTTP. Source: sources.list(5)."""
    parts = sorted((apt / "sources.list.d").glob("*"))
    for path in [apt / "sources.list", *parts]:
        if not path.is_file():
            continue
        parse = {".sources": deb822, ".list": one_line}.get(path.suffix)
        for uri, suite, components in parse(path.read_text()) if parse else ():
            if (uri := _resolved(uri)).startswith(("http://", "https://")):
                yield uri, suite, components


def _resolved(uri: str) -> str:
    """Return the first mirror of a list of mirrors in a file, as cloud images have it; any other URI as it is."""
    if not uri.startswith(MIRROR_FILE):
        return uri
    lines = Path("/" + uri.partition("file:")[2].lstrip("/")).read_text().split()
    return next((line for line in lines if line.startswith("http")), "")


def one_line(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Parse sources in the one-line format: `deb [options] URI suite component…`."""
    for line in text.splitlines():
        words = re.sub(r"\[[^]]*\]", "", line.partition("#")[0]).split()
        if words[:1] == ["deb"] and len(words) >= 4:
            yield words[1], words[2], words[3:]


def deb822(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Parse sources in the deb822 format: stanzas of fields, a field continues where a line begins with a space."""
    text = re.sub(r"(?m)^#.*\n?", "", text)
    for stanza in re.split(r"\n\s*\n", text):
        lines = re.sub(r"\n[ \t]+", " ", stanza).splitlines()
        fields = {key.lower(): value.split() for key, _, value in (line.partition(":") for line in lines)}
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            for uri in fields.get("uris", []):
                for suite in fields.get("suites", []):
                    yield uri, suite, fields.get("components", [])
