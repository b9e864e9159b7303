"""The node's switch for huge pages, with a file in its place and killed users."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.linux.huge_pages import huge_pages, node_wide, restore_node

USER = """
import sys
from pathlib import Path
from kybernate_shim.linux.huge_pages import node_wide
with node_wide(Path(sys.argv[1]), Path(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.readline()
"""


def test_off_does_nothing_and_an_unwritable_switch_is_named(tmp_path: Path) -> None:
    with huge_pages("off"):
        pass
    with pytest.raises(Refused, match="cannot be set: No such file"), node_wide(tmp_path / "no", tmp_path):
        pass
    assert not (tmp_path / "previous").exists()


def test_never_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    with pytest.raises(Refused, match="is set to never"), node_wide(tmp_path / "enabled", tmp_path):
        pass
    assert (tmp_path / "enabled").read_text() == "always madvise [never]\n"
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
