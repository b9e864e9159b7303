"""The address of a pod's socket, and who gets to listen on it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from kybernate_shim.address import clear_away, group_of, listen, socket_path


def test_socket_path_hashes_address_namespace_and_group() -> None:
    name = b"/run/containerd/containerd.sock/default/t1"
    path = socket_path("/run/containerd/containerd.sock", "default", "t1")
    assert path == Path("/run/containerd/s") / hashlib.sha256(name).hexdigest()


def test_socket_path_cleans_the_address_as_go_does() -> None:
    assert socket_path("/run//c/./c.sock/", "n", "g") == socket_path("/run/c/c.sock", "n", "g")


def test_longest_names_still_fit_a_socket_address() -> None:
    assert len(str(socket_path("/run/" + "x" * 90, "n" * 76, "i" * 64))) < 108


@pytest.mark.parametrize(
    ("annotations", "group"),
    [
        ({}, "own"),
        (None, "own"),
        ({"io.kubernetes.cri.sandbox-id": "pod"}, "pod"),
        ({"io.containerd.runc.v2.group": "g", "io.kubernetes.cri.sandbox-id": "pod"}, "g"),
        ({"io.kubernetes.cri.sandbox-id": ""}, "own"),
    ],
)
def test_group_is_the_pods(tmp_path: Path, annotations: dict[str, str] | None, group: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"annotations": annotations}))
    assert group_of(config, "own") == group


def test_listener_is_for_root_alone(tmp_path: Path) -> None:
    listener = listen(tmp_path / "s")
    assert listener is not None
    with listener:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_second_container_of_a_pod_finds_the_first_ones_daemon(tmp_path: Path) -> None:
    listener = listen(tmp_path / "s")
    assert listener is not None
    with listener:
        inode = (tmp_path / "s").stat().st_ino
        assert listen(tmp_path / "s") is None
        assert (tmp_path / "s").stat().st_ino == inode


def test_socket_of_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    listener = listen(tmp_path / "s")
    assert listener is not None
    with listener, socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(tmp_path / "s"))


def test_listener_is_not_inherited_by_programs(tmp_path: Path) -> None:
    listener = listen(tmp_path / "s")
    assert listener is not None
    with listener:
        assert not os.get_inheritable(listener.fileno())


def test_socket_of_a_killed_daemon_is_cleared_away(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    clear_away(tmp_path / "s")
    clear_away(tmp_path / "s")
    clear_away(tmp_path / "no directory" / "s")
    assert not any(tmp_path.iterdir())


def test_socket_of_a_living_daemon_stays_even_when_its_queue_is_full(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(tmp_path / "s"))
        busy.listen(0)
        callers = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(str(tmp_path / "s"))
        clear_away(tmp_path / "s")
        assert listen(tmp_path / "s") is None
        for caller in callers:
            caller.close()
    assert (tmp_path / "s").exists()
