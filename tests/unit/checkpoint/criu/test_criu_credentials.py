"""Privileges as CRIU's files hold them, and files that CRIU would not have written."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate_shim.checkpoint.criu import credentials as criu_credentials
from kybernate_shim.checkpoint.criu.credentials import credentials, held
from kybernate_shim.checkpoint.criu.images import COMMON, CORE, FILES, INVENTORY, PSTREE
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.credentials import Capabilities
from kybernate_shim.messages import criu_pb2 as criu

NODE = criu.Kernel(pid=1, network=2, ipc=3, uts=4, mount=5, user=6, cgroup=7, time=8)
OWN = criu.Kernel(pid=11, network=12, ipc=13, uts=14, mount=15, user=6, cgroup=7, time=8)
FILTERS = [
    criu.SeccompFilter(program=b"runtime", flags=1),
    criu.SeccompFilter(program=b"own", previous=0, flags=1),
    criu.SeccompFilter(program=b"cycle", previous=2),
]


def write(path: Path, magics: tuple[int, ...], *entries: Any) -> None:
    data = [entry.SerializeToString() for entry in entries]
    content = struct.pack(f"<{len(magics)}I", *magics)
    path.write_bytes(content + b"".join(struct.pack("<I", len(entry)) + entry for entry in data))


def core(*, state: int = 1, nice: int = 0, seccomp: int | None = None, group: int = 2, **creds: Any) -> criu.Core:
    thread = criu.Thread(creds=criu.Creds(**creds), nice=nice, cgroup_set=group)
    if seccomp is not None:
        thread.seccomp_mode, thread.seccomp_filter = 2, seccomp
    limits = criu.Limits(limits=[criu.Limit(soft=1, hard=2)])
    return criu.Core(task=criu.Task(state=state, name="sh", limits=limits, login=0xFFFFFFFF), thread=thread)


def cgroups(path: str) -> list[criu.CgroupMember]:
    return [criu.CgroupMember(controller=name, path=path) for name in ("", "pids")]


def image(directory: Path, threads: dict[int, criu.Core], *, kernel: criu.Kernel = OWN, pid: int = 1) -> Path:
    """Write an image of one process; its threads' files by their numbers."""
    write(directory / "pstree.img", (COMMON, PSTREE), criu.Process(pid=pid, threads=sorted(threads)))
    for tid, one in threads.items():
        write(directory / f"core-{tid}.img", (COMMON, CORE), one)
    write(directory / f"ids-{pid}.img", (COMMON, criu_credentials.IDS), kernel)
    write(directory / "inventory.img", (INVENTORY,), criu.Inventory(version=2, node=NODE, node_cgroups=1))
    write(directory / "seccomp.img", (COMMON, criu_credentials.SECCOMP), criu.Seccomp(filters=FILTERS))
    sets = {1: "/shim", 2: "/pods/c", 3: "/pods/c/below", 4: "/pods", 5: "/pods/c/../x"}
    found = criu.Cgroups(sets=[criu.CgroupSet(id=id, members=cgroups(path)) for id, path in sets.items()])
    write(directory / "cgroup.img", (COMMON, criu_credentials.CGROUPS), found)
    return directory


def test_every_set_of_ids_and_capabilities_is_read(tmp_path: Path) -> None:
    words = {name: [place, 1] for place, name in enumerate(("inheritable", "permitted", "effective", "bounding"))}
    ids = {"uid": 1, "euid": 2, "suid": 3, "fsuid": 4, "gid": 5, "egid": 6, "sgid": 7, "fsgid": 8}
    first = core(nice=-3, **ids, **words, ambient=[4, 1], groups=[9], securebits=5, no_new_privs=1, lsm_profile="p")
    (one,) = credentials(image(tmp_path, {1: first}))
    assert (one.uids, one.gids, one.groups) == ((1, 2, 3, 4), (5, 6, 7, 8), (9,))
    assert one.caps == Capabilities(*(place + (1 << 32) for place in range(5)))
    assert (one.securebits, one.no_new_privs, one.label, one.limits, one.boost) == (5, True, "p", (2,), 3)
    assert one.node_namespaces == ("user", "cgroup", "time")
    assert (one.uid_map, one.stray_cgroup) == ((), "")


def test_threads_have_their_own(tmp_path: Path) -> None:
    found = credentials(image(tmp_path, {1: core(), 4: core(uid=7), 3: core(seccomp=0)}))
    assert [(one.tid, one.uids[0], one.seccomp) for one in found] == [(1, 0, 0), (3, 0, 2), (4, 7, 0)]


def test_synchronized_filters_are_those_of_all_threads(tmp_path: Path) -> None:
    """CRIU leaves them out of the files of the other threads."""
    found = credentials(image(tmp_path, {1: core(seccomp=1), 4: core()}))
    assert [len(one.filters) for one in found] == [2, 2]
    assert found[0].filters == found[1].filters


def test_filters_of_one_thread_alone_are_not_those_of_others(tmp_path: Path) -> None:
    found = credentials(image(tmp_path, {1: core(), 4: core(seccomp=0)}))
    assert [len(one.filters) for one in found] == [0, 1]


@pytest.mark.parametrize(
    ("group", "stray"),
    [(2, ""), (3, ""), (4, "/pods"), (5, "/pods/c/../x"), (1, "of the programs that"), (9, "of the programs that")],
)
def test_cgroup_beside_the_first_process_is_stray(tmp_path: Path, group: int, stray: str) -> None:
    second = credentials(image(tmp_path, {1: core(), 4: core(group=group)}))[1]
    assert second.stray_cgroup.startswith(stray)
    assert bool(second.stray_cgroup) == bool(stray)


def test_first_process_in_the_cgroup_of_criu_is_stray(tmp_path: Path) -> None:
    assert credentials(image(tmp_path, {1: core(group=1)}))[0].stray_cgroup


@pytest.mark.parametrize("kind", ["pid", "network", "ipc", "uts", "mount"])
def test_namespace_of_the_node_is_told(tmp_path: Path, kind: str) -> None:
    kernel = criu.Kernel.FromString(OWN.SerializeToString())
    setattr(kernel, kind, getattr(NODE, kind))
    assert kind in credentials(image(tmp_path, {1: core()}, kernel=kernel))[0].node_namespaces
    kernel.ClearField(kind)  # type: ignore[arg-type]  # one of its fields
    assert kind in credentials(image(tmp_path, {1: core()}, kernel=kernel))[0].node_namespaces


def test_user_namespace_has_its_map(tmp_path: Path) -> None:
    kernel = criu.Kernel.FromString(OWN.SerializeToString())
    kernel.user = 20
    ranges = [criu.IdRange(inside=0, outside=100000, count=65536)]
    write(
        tmp_path / "userns-20.img",
        (COMMON, criu_credentials.USER_NAMESPACE),
        criu.UserNamespace(users=ranges, groups=ranges),
    )
    (one,) = credentials(image(tmp_path, {1: core()}, kernel=kernel))
    assert one.uid_map == one.gid_map == ("0 100000 65536",)


def test_dead_process_has_none(tmp_path: Path) -> None:
    image(tmp_path, {1: core()})
    write(tmp_path / "core-2.img", (COMMON, CORE), criu.Core(task=criu.Task(state=2, name="z")))
    tree = [criu.Process(pid=1, threads=[1]), criu.Process(pid=2, ppid=1, threads=[2])]
    write(tmp_path / "pstree.img", (COMMON, PSTREE), *tree)
    assert [one.pid for one in credentials(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("types", "found"),
    [
        ([criu.File(type=1), criu.File(type=4, internet=criu.InternetSocket(type=1))], []),
        ([criu.File(type=4, internet=criu.InternetSocket(type=3))], ["a raw socket"]),
        ([criu.File(type=10), criu.File(type=10), criu.File(type=15)], ["a packet socket", "a network tunnel"]),
    ],
)
def test_what_takes_a_capability_to_open_is_listed(tmp_path: Path, types: list[criu.File], found: list[str]) -> None:
    write(tmp_path / "files.img", (COMMON, FILES), *types)
    assert [one.what for one in held(tmp_path)] == found


def test_thread_without_credentials_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"core-1\.img: no credentials"):
        credentials(image(tmp_path, {1: criu.Core(task=criu.Task(state=1, name="sh"), thread=criu.Thread())}))


@pytest.mark.parametrize("place", [2, 3, 9])
def test_row_of_filters_must_end(tmp_path: Path, place: int) -> None:
    with pytest.raises(Damaged, match=r"seccomp\.img: no filter"):
        credentials(image(tmp_path, {1: core(seccomp=place)}))


def test_process_must_be_among_its_threads(tmp_path: Path) -> None:
    image(tmp_path, {1: core(), 4: core()})
    write(tmp_path / "pstree.img", (COMMON, PSTREE), criu.Process(pid=1, threads=[4]))
    with pytest.raises(Damaged, match="process 1 has 1 threads"):
        credentials(tmp_path)


def test_image_without_a_process_is_invalid(tmp_path: Path) -> None:
    image(tmp_path, {1: core()})
    write(tmp_path / "pstree.img", (COMMON, PSTREE))
    with pytest.raises(Damaged, match="no living process"):
        credentials(tmp_path)


@pytest.mark.parametrize("name", ["core-1.img", "ids-1.img", "inventory.img"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (image(tmp_path, {1: core()}) / name).unlink()
    with pytest.raises(Damaged, match=name):
        credentials(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    name=st.sampled_from(["pstree.img", "core-1.img", "ids-1.img", "seccomp.img", "cgroup.img", "inventory.img"]),
    place=st.integers(0, 400),
    byte=st.integers(0, 255),
)
def test_any_changed_byte_is_read_or_invalid(tmp_path: Path, name: str, place: int, byte: int) -> None:
    path = image(tmp_path, {1: core(seccomp=1, permitted=[1, 2]), 4: core()}) / name
    content = bytearray(path.read_bytes())
    content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        credentials(tmp_path)
    except Damaged:
        pass
