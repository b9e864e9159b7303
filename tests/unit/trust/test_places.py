"""Which directories are taken for images and logs: those that no other user can change or exchange."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.trust import places
from kybernate_shim.trust.places import close_to_others, make_private, require_private


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in one that others can enter."""
    (tmp_path / "open").mkdir(mode=0o755)
    path = tmp_path / "open" / "place"
    path.mkdir(mode=0o755)
    return path


def test_directory_that_others_can_read_is_fine_and_stays(place: Path) -> None:
    require_private(place)
    assert not make_private(place)
    assert mode(place) == 0o755


def test_what_is_missing_is_made_for_root_alone(place: Path) -> None:
    assert make_private(place / "a" / "b")
    assert (mode(place / "a"), mode(place / "a" / "b")) == (0o700, 0o700)


def test_missing_directory_is_no_trusted_one(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match="place/none"):
        require_private(place / "none")


@pytest.mark.parametrize("bits", [0o775, 0o757, 0o777, 0o1777])
def test_writable_directory_is_refused_with_a_remedy(place: Path, bits: int) -> None:
    place.chmod(bits)
    with pytest.raises(Refused, match=f"mode {bits:04o}.*chmod 0700 {place}"):
        require_private(place)


@pytest.mark.parametrize("bits", [0o775, 0o777])
def test_writable_parent_is_named(place: Path, bits: int) -> None:
    place.parent.chmod(bits)
    with pytest.raises(Refused, match=f"^{place.parent} .*chmod go-w {place.parent}$"):
        require_private(place)


def test_sticky_parent_is_fine_as_long_as_what_is_in_it_is_ours(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.chmod(0o1777)
    require_private(place)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(places, "_trusted", lambda: (stranger,))
    with pytest.raises(Refused, match="belongs to another user"):
        require_private(place)


def test_link_is_no_directory(place: Path) -> None:
    link = place.parent / "link"
    link.symlink_to(place)
    with pytest.raises(Refused, match=f"{link} is a link to {place}"):
        require_private(link)
    with pytest.raises(Refused, match=f"{link} is a link"):
        make_private(link)


@pytest.mark.parametrize("target", ["{parent}/place", "place", "../open/place"])
def test_link_of_ours_among_the_parents_is_followed(place: Path, target: str) -> None:
    """An administrator may have moved /var/lib/containerd to a larger disk."""
    (place / "inner").mkdir()
    link = place.parent / "link"
    link.symlink_to(target.format(parent=place.parent))
    require_private(link / "inner")
    place.chmod(0o777)
    with pytest.raises(Refused, match=f"^{place} "):
        require_private(link / "inner")


def test_links_in_a_circle_are_refused(place: Path) -> None:
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    with pytest.raises(Refused, match="more than 40 links"):
        require_private(place / "a" / "inner")


def test_way_up_is_followed_in_the_directories_themselves(place: Path) -> None:
    require_private(place / ".." / "place")
    require_private(Path("/../..") / place.relative_to("/"))


def test_file_is_no_directory(place: Path) -> None:
    (place / "file").write_text("")
    for path in (place / "file", place / "file" / "inner"):
        with pytest.raises(Refused, match="file: Not a directory"):
            make_private(path)


def test_relative_path_is_refused() -> None:
    with pytest.raises(Refused, match="absolute"):
        require_private(Path("images"))


def test_empty_directory_is_closed_and_a_used_one_is_not(place: Path) -> None:
    with pytest.raises(Refused, match=f"contains other files.*chmod 0700 {place}"):
        close_to_others(place, empty=False)
    assert mode(place) == 0o755
    close_to_others(place, empty=True)
    assert mode(place) == 0o700
    close_to_others(place, empty=False)


def test_no_descriptor_is_left_open(place: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    (place / "link").symlink_to("x")
    for path in (place, place / "..", place / "link", place / "link" / "inner", place / "none"):
        try:
            require_private(path)
        except (Refused, FileNotFoundError):
            pass
    assert count() == before
