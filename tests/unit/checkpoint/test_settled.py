"""Threads are given what CRIU has not, while they are held; what a container cannot give them is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.checkpoint import settled as module
from kybernate_shim.checkpoint.names import Names
from kybernate_shim.checkpoint.settled import Settled
from kybernate_shim.linux.thread_settings import ThreadSettings
from kybernate_shim.oci.spec import Spec

THREADS = (ThreadSettings(1, 7, cpus="0"),)


def settled(threads: tuple[ThreadSettings, ...]) -> Settled:
    return Settled.of(Names(), Spec({}), Path("/nowhere"), threads)


def test_threads_that_get_something_must_be_held() -> None:
    assert settled(THREADS).must_be_held
    assert not settled(()).must_be_held


def test_what_threads_cannot_have_is_kept_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(module, "put_back", lambda init, threads: given.append((init, threads)) or ["no CPU 0"])
    monkeypatch.setattr(module.cgroup_views, "narrow", lambda init: None)
    one = settled(THREADS)
    one.settle(42)
    assert (given, one.differences) == ([(42, THREADS)], ["no CPU 0"])


def test_mount_is_read_only_where_it_is_restored(tmp_path: Path) -> None:
    """Where the links of the dumped image led, and not where the new one has none."""
    mount = {"destination": "/var/run/secrets", "type": "bind", "source": "/s", "options": ["rbind", "ro"]}
    one = Settled.of(Names(), Spec({"mounts": [mount]}), tmp_path, (), {"/var/run/secrets": "/run/secrets"})
    assert list(one.read_only) == ["/run/secrets"]
