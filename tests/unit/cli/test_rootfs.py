"""Layers of a container image, by the names that containerd gives their snapshots."""

from __future__ import annotations

import hashlib

from kybernate.node.rootfs import chains, select


def test_lowest_layer_is_named_by_its_own_digest() -> None:
    assert list(chains(["sha256:a"])) == ["sha256:a"]


def test_higher_layers_are_named_by_all_below() -> None:
    second = "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    third = "sha256:" + hashlib.sha256(f"{second} sha256:c".encode()).hexdigest()
    assert list(chains(["sha256:a", "sha256:b", "sha256:c"])) == ["sha256:a", second, third]


def test_index_entry_is_chosen_by_architecture() -> None:
    entries = [
        {"digest": "attestation", "platform": {"os": "unknown", "architecture": "unknown"}},
        {"digest": "arm", "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": "pc", "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    chosen = select(entries, "amd64")
    assert chosen is not None
    assert chosen["digest"] == "pc"
    assert select(entries, "riscv64") is None
