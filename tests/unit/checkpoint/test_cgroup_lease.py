"""Who may put processes into a cgroup by a restore, and who may kill what is in there."""

from __future__ import annotations

import fcntl
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.cgroup_lease import forget, inherited, leased
from kybernate_shim.errors import Refused
from kybernate_shim.linux.cgroup.cgroup import Cgroup

CGROUP = "/default/c"


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids in every cgroup."""
    pids: list[int] = []
    monkeypatch.setattr(Cgroup, "processes", lambda cgroup: list(pids))
    return pids


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def killed(cgroups_path: str, bundle: Path, notes: Path) -> None:
    """Leave behind what a restore leaves whose daemon is killed: its note, unlocked."""
    with leased(cgroups_path, bundle, notes):
        (note,) = notes.iterdir()
        content = note.read_text()
    note.write_text(content)


def test_nothing_is_left_of_a_lease(notes: Path) -> None:
    for _ in range(2):
        with leased(CGROUP, Path("/one"), notes):
            assert len(list(notes.iterdir())) == 1
        assert list(notes.iterdir()) == []


def test_cgroup_with_processes_is_refused_with_their_pids(notes: Path, there: list[int]) -> None:
    there += [12, 7]
    with pytest.raises(Refused, match=r"in cgroup /default/c, .* \(7, 12\)"), leased(CGROUP, Path("/one"), notes):
        raise AssertionError("it was leased")
    assert list(notes.iterdir()) == []


def test_refusal_leaves_what_a_killed_daemon_held(notes: Path, there: list[int]) -> None:
    killed(CGROUP, Path("/one"), notes)
    there.append(7)
    with (
        pytest.raises(
            Refused,
            match=r"if it still runs, or an earlier restore|is in progress; nothing was changed",
        ),
        leased(CGROUP, Path("/two"), notes),
    ):
        raise AssertionError("it was leased")
    with inherited(CGROUP, Path("/one"), notes) as ours:
        assert ours


def test_second_lease_is_refused_until_the_first_has_ended(notes: Path) -> None:
    with (
        leased(CGROUP, Path("/one"), notes),
        pytest.raises(Refused, match="another restore"),
        leased(CGROUP, Path("/two"), notes),
    ):
        raise AssertionError("it was leased twice")
    with leased(CGROUP, Path("/two"), notes):
        pass


def test_other_cgroups_are_free(notes: Path) -> None:
    with leased(CGROUP, Path("/one"), notes), leased("/default/d", Path("/two"), notes):
        pass


def test_both_forms_of_a_cgroups_name_are_one(notes: Path) -> None:
    with (
        leased("a.slice:b:c", Path("/one"), notes),
        pytest.raises(
            Refused,
            match=r"if it still runs, or an earlier restore|is in progress; nothing was changed",
        ),
        ExitStack() as stack,
    ):
        stack.enter_context(leased("/a.slice/b-c.scope", Path("/two"), notes))


def test_container_without_a_cgroup_of_its_own_holds_none(notes: Path, there: list[int]) -> None:
    there.append(1)
    with leased("", Path("/one"), notes), inherited("", Path("/one"), notes) as ours:
        assert not ours
    assert not notes.exists()


def test_what_a_killed_daemon_held_is_inherited_until_nothing_is_left_of_it(notes: Path, there: list[int]) -> None:
    killed(CGROUP, Path("/one"), notes)
    there.append(7)
    for _ in range(2):
        with inherited(CGROUP, Path("/one"), notes) as ours:
            assert ours
            with pytest.raises(Refused, match="another restore"), leased(CGROUP, Path("/two"), notes):
                raise AssertionError("it was leased")
    forget(CGROUP, notes)
    with inherited(CGROUP, Path("/one"), notes) as ours:
        assert not ours


def test_heir_waits_for_who_only_looks(notes: Path) -> None:
    killed(CGROUP, Path("/one"), notes)
    (note,) = notes.iterdir()
    with note.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        timer = threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN))
        timer.start()
        with inherited(CGROUP, Path("/one"), notes) as ours:
            assert ours
        timer.join()


@pytest.mark.parametrize("name", ["/default//c", "default/c", "/default/x/../c"])
def test_names_of_one_cgroup_are_one(notes: Path, name: str) -> None:
    with (
        leased(CGROUP, Path("/one"), notes),
        pytest.raises(
            Refused,
            match=r"if it still runs, or an earlier restore|is in progress; nothing was changed",
        ),
        ExitStack() as stack,
    ):
        stack.enter_context(leased(name, Path("/two"), notes))


def test_nobody_inherits_anothers_cgroup(notes: Path) -> None:
    killed(CGROUP, Path("/a-long-name"), notes)
    with inherited(CGROUP, Path("/two"), notes) as ours:
        assert not ours
    with leased(CGROUP, Path("/two"), notes), inherited(CGROUP, Path("/a-long-name"), notes) as ours:
        assert not ours
    killed(CGROUP, Path("/a-long-name"), notes)
    killed(CGROUP, Path("/two"), notes)
    with inherited(CGROUP, Path("/a-long-name"), notes) as ours:
        assert not ours
    with inherited(CGROUP, Path("/two"), notes) as ours:
        assert ours


def test_who_never_held_it_inherits_nothing(notes: Path) -> None:
    with inherited(CGROUP, Path("/one"), notes) as ours:
        assert not ours
    assert not notes.exists()
