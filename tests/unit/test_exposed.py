"""Which files of a node are too open, and what closing them touches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.node import exposed, health
from kybernate.node.exposed import Exposed, find, repair
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.config import Config


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directories of a node, all closed."""
    for name in ("run", "state", "roots", "etc"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setattr(exposed, "RUN", tmp_path / "run")
    monkeypatch.setattr(exposed, "STATE", tmp_path / "state")
    monkeypatch.setattr(exposed, "DEFAULT_PATH", tmp_path / "etc" / "shim.toml")
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


def config(node: Path) -> Config:
    return Config(
        checkpoint_root=node / "roots", work_root=node / "work", audit_log=node / "audit", key_directory=node / "keys"
    )


def found(node: Path) -> list[str]:
    return [str(Path(one.path).relative_to(node)) for one in find(config(node))]


def image(directory: Path) -> Path:
    directory.mkdir(mode=0o755, parents=True)
    for name in (NAME, "pages-1.img"):
        (directory / name).write_text("")
        (directory / name).chmod(0o644)
    return directory


def test_closed_node_has_none(node: Path) -> None:
    (node / "etc" / "shim.toml").write_text("")
    (node / "etc" / "shim.toml").chmod(0o644)
    assert found(node) == []


def test_image_of_an_older_release_is_found_and_closed(node: Path) -> None:
    old = image(node / "roots" / "namespace" / "old")
    (node / "roots").chmod(0o755)  # others may see which images there are
    names = ["roots/namespace/old", f"roots/namespace/old/{NAME}", "roots/namespace/old/pages-1.img"]
    assert found(node) == names
    for one in find(config(node)):
        repair(one)
    assert found(node) == []
    assert (old.stat().st_mode & 0o777, (old / NAME).stat().st_mode & 0o777) == (0o700, 0o600)


def test_other_files_in_a_configured_root_are_not_touched(node: Path) -> None:
    (node / "roots" / "web").mkdir(mode=0o755)
    (node / "roots" / "web" / "index.html").write_text("")
    (node / "roots" / "notes").write_text("")
    assert found(node) == []


def test_root_that_others_can_change_keeps_being_readable(node: Path) -> None:
    (node / "roots").chmod(0o777)
    assert found(node) == ["roots"]
    repair(*find(config(node)))
    assert (node / "roots").stat().st_mode & 0o777 == 0o755


def test_everything_in_our_own_directories_counts(node: Path) -> None:
    (node / "state" / "keys").mkdir(mode=0o700)
    (node / "state" / "keys" / "node.key").write_text("")
    os.mkfifo(node / "run" / "fifo", 0o644)
    (node / "audit").write_text("")
    assert found(node) == ["audit", "run/fifo", "state/keys/node.key"]


def test_configuration_may_be_read_but_not_changed(node: Path) -> None:
    (node / "etc" / "shim.toml").write_text("")
    (node / "etc" / "shim.toml").chmod(0o664)
    (one,) = find(config(node))
    repair(one)
    assert (node / "etc" / "shim.toml").stat().st_mode & 0o777 == 0o644


def test_links_are_neither_found_nor_followed(node: Path) -> None:
    victim = node / "victim"
    victim.write_text("")
    victim.chmod(0o644)
    (node / "state" / "link").symlink_to(victim)
    assert found(node) == []
    file = node / "state" / "file"
    file.write_text("")
    file.chmod(0o644)
    (one,) = find(config(node))
    file.unlink()
    file.symlink_to(victim)
    with pytest.raises(PermissionError, match="replaced"):
        repair(one)
    assert victim.stat().st_mode & 0o777 == 0o644


def test_file_with_another_name_elsewhere_is_left(node: Path) -> None:
    """Closing it would close the other one as well, which may be /etc/passwd."""
    (node / "victim").write_text("")
    (node / "victim").chmod(0o644)
    (node / "state" / "file").hardlink_to(node / "victim")
    (one,) = find(config(node))
    with pytest.raises(PermissionError, match="other names"):
        repair(one)
    assert (node / "victim").stat().st_mode & 0o777 == 0o644


def test_report_names_directories_and_the_remedy(node: Path) -> None:
    image(node / "roots" / "old")
    (finding,) = health._files(config(node), fix=False)
    assert finding.verdict == "note"
    assert f"{node}/roots/old (directory, mode 0755), and 2 more" in finding.found
    assert "--fix" in finding.advice
    (finding,) = health._files(config(node), fix=True)
    assert (finding.verdict, finding.found) == ("ok", f"closed to other users: {node}/roots/old, 3 in all")
    (finding,) = health._files(config(node), fix=False)
    assert finding.verdict == "ok"


def test_root_in_which_every_checkpoint_is_refused_is_bad(node: Path) -> None:
    (node / "roots").chmod(0o777)
    assert "bad" in [finding.verdict for finding in health._files(config(node), fix=False)]
    list(health._files(config(node), fix=True))
    assert "bad" not in [finding.verdict for finding in health._files(config(node), fix=False)]


def test_file_that_cannot_be_closed_is_told(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(node / "roots" / "old")

    def fail(one: Exposed) -> None:
        raise PermissionError(f"{one.path} is immutable")

    monkeypatch.setattr(health, "repair", fail)
    (finding,) = health._files(config(node), fix=True)
    assert finding.verdict == "note"
    assert "pages-1.img is immutable" in finding.found


def test_sockets_of_the_agent_are_open_on_purpose_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(exposed, "RUN", run)
    monkeypatch.setattr(exposed, "STATE", tmp_path / "none")
    (run / "self").mkdir(parents=True)
    for name, mode in {"": 0o710, "self": 0o755, "agent.sock": 0o660, "self/agent.sock": 0o666}.items():
        if name.endswith(".sock"):
            (run / name).touch()
        (run / name).chmod(mode)
    config = Config(
        checkpoint_root=tmp_path / "a", work_root=tmp_path / "b", key_directory=tmp_path / "c", audit_log=None
    )
    assert exposed.find(config) == []
    (run / "agent.sock").chmod(0o662)
    (run / "self").chmod(0o775)
    (run / "cuda.sock").touch(mode=0o660)
    found = {Path(one.path).name: one.wanted for one in exposed.find(config)}
    assert found == {"agent.sock": 0o660, "self": 0o755, "cuda.sock": 0o600}
