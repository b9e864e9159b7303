"""Facts about processes: real ones, ours and children with awkward names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kybernate_shim.linux import process
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.process import (
    has_ended,
    holders,
    is_exiting,
    is_nodes_own,
    name_of,
    oom_score_adj,
    parent_of,
    set_oom_score_adj,
    start_time,
    title_of,
    tree_below,
)

NOBODY = 2**22 + 1  # above the kernel's greatest pid


def test_parent_of_a_process_with_parentheses_in_its_name(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b c"
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert parent_of(child.pid) == os.getpid()
        assert start_time(child.pid) >= start_time(os.getpid())
        child.communicate()


def test_tree_has_descendants_alone() -> None:
    """Also one whose parent is not among the processes that are asked about."""
    script = "import subprocess; cat = subprocess.Popen(['cat']); print(cat.pid, flush=True); cat.wait()"
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        asked = [NOBODY, 1, os.getpid(), grandchild, child.pid]
        assert tree_below(child.pid, asked) == [child.pid, grandchild]
        assert tree_below(os.getpid(), [grandchild]) == [os.getpid(), grandchild]
        assert tree_below(grandchild, asked) == [grandchild]
        child.communicate()


def test_name_for_a_text_cannot_act_on_a_terminal_or_a_log() -> None:
    script = "open('/proc/self/comm', 'wb').write(b'a\\n\\x1b[2J\\xff b'); print(flush=True); input()"
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert name_of(child.pid) == "a??[2J? b"
        assert title_of(child.pid) == f"a??[2J? b[{child.pid}]"
        child.communicate()
    assert title_of(NOBODY) == f"?[{NOBODY}]"


def test_zombie_is_exiting_and_a_running_process_is_not() -> None:
    assert not is_exiting(os.getpid())
    assert not has_ended(os.getpid())
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_exiting(pid)
    assert has_ended(pid)
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        is_exiting(pid)
    assert has_ended(pid)


def test_oom_score_can_be_raised() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        set_oom_score_adj(child.pid, 987)
        assert oom_score_adj(child.pid) == 987
        child.communicate()


def test_process_that_does_not_exist() -> None:
    for ask in (parent_of, start_time, oom_score_adj, is_exiting):
        with pytest.raises(ProcessLookupError):
            ask(NOBODY)
    with pytest.raises(ProcessLookupError):
        set_oom_score_adj(NOBODY, 0)


def test_holders_are_named(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"):
        assert any(holder.endswith(f"[{os.getpid()}]") for holder in holders(tmp_path))
    assert holders(tmp_path) == []


def test_subreaper_inherits_orphans() -> None:
    script = (
        "import os, subprocess, sys\n"
        "from kybernate_shim.linux.prctl import become_subreaper, set_process_name\n"
        "become_subreaper(); set_process_name('a-name-that-is-too-long')\n"
        "out = subprocess.run(['sh', '-c', 'sleep 0.2 & echo $!'], stdout=subprocess.PIPE, text=True)\n"
        "assert os.waitpid(int(out.stdout), 0)[0]\n"
        "print(open('/proc/self/comm').read().strip())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("a-name-that-is-\n", "")


def test_failed_call_names_its_subject() -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/mount"):
        syscalls.umount("/no/such/mount")


def test_name_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        syscalls.umount("/tmp\0/x")


ASLEEP = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's processes are the node's own")
@pytest.mark.parametrize(
    ("wrapper", "own"),
    [
        ([], True),
        (["setpriv", "--reuid=1000", "--clear-groups"], False),
        (["setpriv", "--ruid=1000"], False),
        (["unshare", "--mount"], False),
        (["unshare", "--user", "--map-root-user"], False),
        (["unshare", "--pid", "--fork"], False),
    ],
)
def test_process_is_the_nodes_own_by_its_user_and_namespaces(wrapper: list[str], own: bool) -> None:
    with subprocess.Popen([*wrapper, *ASLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert is_nodes_own(int(children[0]) if children else process.pid) == own
        process.communicate()
    assert not is_nodes_own(process.pid)


def test_search_for_holders_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be millions of descriptors on a node, and thousands of processes that hold the same."""
    with (tmp_path / "file").open("w"):
        monkeypatch.setattr(process, "_all", lambda: [os.getpid()] * 1000)
        assert len(holders(tmp_path)) == process.MOST_NAMED
        clock = iter([0.0, *[0.1] * 3, *[10.0] * 2000])
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        assert holders(tmp_path) == []
