"""Huge pages for a process while it maps memory; the node's switch, with a file in its place and killed users."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate_shim.cuda.pages import SWITCH, Advisor, HugePagesUnavailable, huge_pages, node_wide, restore_node
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
MAP_AND_FILL = "[globals().update(m=mmap.mmap(-1, {size}, flags=34)), time.sleep({pause}), m.write(b'x' * {size})][-1]"
USER = """
import sys
from pathlib import Path
from kybernate_shim.cuda.pages import node_wide
with node_wide(Path(sys.argv[1]), Path(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.readline()
"""


def test_mapping_that_appears_is_advised_and_an_old_one_is_not() -> None:
    with MemoryProcess() as target:
        old = target.region("a", 16 * MIB)
        with Advisor(target.pid) as advisor:
            assert target.ask(MAP_AND_FILL.format(size=64 * MIB, pause=0.3)) == 64 * MIB
        assert sum(region.size for region in advisor.advised) >= 64 * MIB
        if SWITCH.exists() and "[never]" not in SWITCH.read_text():
            huge = sum(target.resident_kib(region, "AnonHugePages") for region in advisor.advised)
            assert huge >= 32 * 1024
        assert not any(region.start < old.end and old.start < region.end for region in advisor.advised)


def test_advisor_of_a_process_that_ends_or_has_ended_just_stops() -> None:
    with MemoryProcess() as target:
        with Advisor(target.pid) as advisor:
            target.kill()
        with huge_pages("process", [target.pid]):
            pass
        assert advisor.advised == []


def test_off_does_nothing_and_an_unwritable_switch_is_named(tmp_path: Path) -> None:
    with huge_pages("off", [1]):
        pass
    with pytest.raises(HugePagesUnavailable, match="cannot be set: No such file"), node_wide(tmp_path / "no", tmp_path):
        pass
    assert not (tmp_path / "previous").exists()


class Node:
    """A switch as the kernel shows it, except that it holds what was written to it."""

    def __init__(self, root: Path) -> None:
        self.switch, self.state = root / "enabled", root / "state"
        self.switch.write_text("always [madvise] never\n")

    @property
    def setting(self) -> str:
        return self.switch.read_text()

    def user(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", USER, str(self.switch), str(self.state)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        return process


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_switch_is_always_meanwhile_and_what_it_was_afterwards(node: Node) -> None:
    with node_wide(node.switch, node.state):
        assert node.setting == "always"
    assert node.setting == "madvise"
    assert not restore_node(node.switch, node.state)


def test_last_user_restores_whoever_it_is(node: Node) -> None:
    with node.user() as other:
        with node_wide(node.switch, node.state), node_wide(node.switch, node.state):
            assert node.setting == "always"
        assert node.setting == "always"
        other.communicate("\n")
    assert node.setting == "madvise"


def test_killed_user_is_cleaned_up_after_by_the_next_start(node: Node) -> None:
    with node.user() as victim:
        victim.send_signal(signal.SIGKILL)
    assert node.setting == "always"
    assert restore_node(node.switch, node.state)
    assert node.setting == "madvise"


def test_user_after_a_killed_one_finds_the_first_setting(node: Node) -> None:
    with node.user() as victim:
        victim.send_signal(signal.SIGKILL)
    with node_wide(node.switch, node.state):
        assert not restore_node(node.switch, node.state)
        assert node.setting == "always"
    assert node.setting == "madvise"


def test_setting_that_the_administrator_changed_meanwhile_stays(node: Node) -> None:
    with node_wide(node.switch, node.state):
        node.switch.write_text("always madvise [never]\n")
    assert node.setting == "always madvise [never]\n"
    assert not restore_node(node.switch, node.state)


def test_failing_user_restores_too(node: Node) -> None:
    with pytest.raises(ZeroDivisionError), node_wide(node.switch, node.state):
        raise ZeroDivisionError
    assert node.setting == "madvise"
