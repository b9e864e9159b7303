"""A manifest for tests that need one, and do not care what is in it."""

from __future__ import annotations

from kybernate_shim.checkpoint.image.manifest import Host, Manifest, Program, Source

MINIMAL = Manifest(
    id="i",
    time="2026-01-02T03:04:05Z",
    source=Source("c"),
    runtime=Program("runc", "1"),
    criu=Program("criu", "4.2"),
    host=Host("6", "x86_64", (), 2, 4096),
)
