"""Which container a process belongs to: by cgroups, with reused pids, moved processes, and names that lie."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.access.own_container import container_of
from kybernate.agent.access.peers import Peer
from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Denied

A, B = "a" * 64, "b" * 64
CALLER = 77


class Alive(Peer):
    def alive(self) -> bool:
        return True


class Dead(Peer):
    def alive(self) -> bool:
        return False


def read(table: Mapping[int, str]):  # type: ignore[no-untyped-def]
    def look(pid: int) -> Mapping[str, str]:
        if pid not in table:
            raise ProcessLookupError
        return {"": table[pid]}

    return look


def known(*ids: str, sandbox: bool = False) -> list[Container]:
    return [
        Container(namespace="k8s.io", id=one, pid=number, pod="p", pod_namespace="n", sandbox=sandbox)
        for number, one in enumerate(ids, 1)
    ]


def found(cgroup: str, own: Mapping[int, str], containers: list[Container]) -> str:
    return container_of(Alive(0, frozenset(), CALLER), containers, read({CALLER: cgroup, **own})).id


@pytest.mark.parametrize("below", ["", "/sub", "/sub/cgroup"])
def test_process_in_or_below_the_cgroup_of_a_container_is_its(below: str) -> None:
    own = {1: f"/kubepods/pod1/{A}", 2: f"/kubepods/pod1/{B}"}
    assert found(own[1] + below, own, known(A, B)) == A
    assert found(own[2] + below, own, known(A, B)) == B


def test_names_of_systemd_are_known() -> None:
    own = {1: f"/kubepods.slice/cri-containerd-{A}.scope"}
    assert found(own[1], own, known(A)) == A


@pytest.mark.parametrize(
    "cgroup",
    [
        "/",
        "/system.slice/ssh.service",
        "/kubepods/pod1",  # of the pod, above the container
        f"/elsewhere/{A}",  # has the id in its name, and is not the container's
        f"/kubepods/pod1/{A}x",
        f"/kubepods/pod1/{A}/../{B}",
        f"/../kubepods/pod1/{A}",
    ],
)
def test_process_elsewhere_is_refused(cgroup: str) -> None:
    with pytest.raises(Denied, match="no cgroup of a container"):
        found(cgroup, {1: f"/kubepods/pod1/{A}"}, known(A))


def test_cgroup_of_another_container_in_the_name_leads_nowhere() -> None:
    own = {1: f"/pods/{A}", 2: f"/pods/{B}"}
    assert found(f"/pods/{A}/{B}", own, known(A, B)) == A


def test_first_process_whose_pid_another_container_has_now_is_not_believed() -> None:
    """The inventory has not heard yet that A ended: its pid is one of B's by now, which nothing knows of."""
    with pytest.raises(Denied, match=r"has ended|is in|has left"):
        found(f"/pods/{B}", {1: f"/pods/{B}"}, known(A))


def test_cgroup_of_two_containers_is_refused() -> None:
    with pytest.raises(Denied, match="2 containers"):
        found(f"/pods/{A}-{B}", {1: f"/pods/{A}-{B}", 2: f"/pods/{A}-{B}"}, known(A, B))


def test_sandbox_and_ended_container_are_no_callers() -> None:
    own = {1: f"/pods/{A}"}
    with pytest.raises(Denied, match=r"has ended|is in|has left"):
        found(own[1], own, known(A, sandbox=True))
    with pytest.raises(Denied, match=r"has ended|is in|has left"):
        found(own[1], {}, known(A))


def test_process_that_ended_while_it_was_looked_at_is_refused() -> None:
    own = {CALLER: f"/pods/{A}", 1: f"/pods/{A}"}
    with pytest.raises(Denied, match="has ended"):
        container_of(Dead(0, frozenset(), CALLER), known(A), read(own))


def test_one_hierarchy_elsewhere_is_enough_for_a_refusal() -> None:
    own = {"memory": f"/pods/{A}", "cpu": f"/pods/{A}"}
    tables = {1: own, CALLER: {**own, "cpu": "/"}}
    with pytest.raises(Denied, match=r"has ended|is in|has left"):
        container_of(Alive(0, frozenset(), CALLER), known(A), tables.__getitem__)


@given(st.text(alphabet="/.ab", max_size=12))
def test_only_what_is_below_is_inside(path: str) -> None:
    own = {1: "/p/a"}
    inside = path == "/p/a" or (path.startswith("/p/a/") and ".." not in path.split("/"))
    try:
        found(path, own, known("a"))
    except Denied:
        assert not inside
    else:
        assert inside
