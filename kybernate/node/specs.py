"""The OCI spec in containerd's record of a container, as far as the node's programs decide by it.

A tenant makes a spec as large as a message may be. Python's parser then holds the interpreter for a second, in any
thread, and all that a program does waits for it. So a large one is parsed by a process of its own, which answers with
the little that is asked of specs anywhere: annotations, and what shows that it has a GPU.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from kybernate_shim import bounded_json
from kybernate_shim.address import GROUP_ANNOTATIONS

if TYPE_CHECKING:
    from kybernate.messages import containers_pb2

LARGE: Final = 256 << 10  # bytes; what is smaller takes some milliseconds
PARSE_SECONDS: Final = 20.0
MOST_EXCERPT: Final = 1 << 20
LONGEST_TEXT: Final = 4096  # characters of an annotation's name or value in an excerpt
MOST_ANNOTATIONS: Final = 64 << 10  # bytes of all that are in an excerpt, those that programs decide by first
PREFIXES: Final = ("io.kubernetes.", "kybernate.io/", "kyb.ai/", "cdi.k8s.io/")
VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES="

Spec = Mapping[str, Any]


def is_large(record: containers_pb2.Container) -> bool:
    """Return whether `spec_of` starts a process, and so blocks for the time that it takes."""
    return len(record.spec.value) > LARGE


def spec_of(record: containers_pb2.Container) -> Spec:
    """Return the record's OCI spec, an excerpt of a large one; an empty one where it is not JSON.

    A sandbox of another kind has one that is not JSON.
    """
    content = record.spec.value
    if not is_large(record):
        return _parsed(content or b"{}")
    try:
        return _by_process(_Content(content))
    except (subprocess.SubprocessError, OSError):
        return {}  # killed, or not done in time: the next look tries again


class _Content:
    """A spec as a key of the cache: by its digest, so that the cache does not keep it."""

    def __init__(self, content: bytes) -> None:
        self._digest = hashlib.sha256(content).digest()  # lets other threads run meanwhile
        self.bytes: bytes | None = content

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self._digest == other._digest


@lru_cache(maxsize=64)
def _by_process(content: _Content) -> Spec:
    given, content.bytes = content.bytes, None
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=given, capture_output=True, timeout=PARSE_SECONDS, check=True
    )
    return _parsed(done.stdout, most_bytes=MOST_EXCERPT)


def _parsed(content: bytes, *, most_bytes: int = bounded_json.MOST_BYTES) -> Spec:
    try:
        spec = bounded_json.parse(content, most_bytes=most_bytes)
    except ValueError:
        return {}
    return spec if isinstance(spec, dict) else {}


def excerpt(spec: Spec) -> dict[str, Any]:
    """Return what matters of a spec, with less than MOST_EXCERPT bytes."""
    environment = _list(_mapping(spec.get("process")).get("env"))
    visible = [one for one in environment if isinstance(one, str) and one.startswith(VISIBLE_DEVICES)]
    devices = [str(_mapping(one).get("path", "")) for one in _list(_mapping(spec.get("linux")).get("devices"))]
    nvidia = [path[:LONGEST_TEXT] for path in devices if path.startswith("/dev/nvidia")]
    return {
        "annotations": dict(_annotations(_mapping(spec.get("annotations")))),
        "process": {"env": [one[:LONGEST_TEXT] for one in visible[-1:]]},
        "linux": {"devices": [{"path": path} for path in nvidia[:1]]},
    }


def _annotations(annotations: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    left = MOST_ANNOTATIONS
    for name in sorted(annotations, key=_rank):
        value = annotations[name]
        if isinstance(value, str) and max(len(name), len(value)) <= LONGEST_TEXT:
            left -= len(name.encode(errors="replace")) + len(value.encode(errors="replace"))
            if left < 0:
                return
            yield name, value


def _rank(name: str) -> tuple[bool, bool, str]:
    return name not in GROUP_ANNOTATIONS, not name.startswith(PREFIXES), name


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


if __name__ == "__main__":
    parsed = _parsed(sys.stdin.buffer.read(bounded_json.MOST_BYTES + 1))
    json.dump(excerpt(parsed) if parsed else {}, sys.stdout)
