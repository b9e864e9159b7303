"""`kybernate registry`: what it holds, where it differs from the images, and how it is made again."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.settings import Settings
from kybernate.doctor import examination
from kybernate.node import verdict
from kybernate.node.finding import HealthFinding, Verdict
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.rebuild import Rebuilt
from kybernate_shim.checkpoint.image.manifest import NAME, REGISTRY
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save

POD = {"pod": "front", "name": "web"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/registry.db"


def test_registry_is_made_from_the_images(node: Node, url: str) -> None:
    save(node.checkpoints / "shop" / "a", namespace="shop", **POD)
    save(node.checkpoints / "b")
    differences = node.json("registry", "check", "--url", url, status=1)["differences"]
    assert [one["kind"] for one in differences] == ["not registered", "not registered"]
    assert node.json("registry", "rebuild", "--url", url) == {
        "images": 2, "damaged": 0, "differences": differences, "unreadable": {}, "unwritten": [],
    }  # fmt: skip
    assert node.run("registry", "check", "--url", url).stdout == "2 images, 0 damaged; 0 differ\n"
    status = node.json("registry", "status", "--url", url)
    assert (status["images"], status["states"], status["url"]) == (2, {"complete": 2}, url)
    shown = node.run("registry", "status", "--url", url).stdout
    assert "images:   2, 32.2 KiB, 0 pinned" in shown
    assert "2 complete" in shown


def test_registry_and_node_are_those_of_the_agents_settings(
    node: Node, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(node.checkpoints / "a")
    settings = replace(Settings(), registry=url, node_name="gpu-7")
    monkeypatch.setattr(Settings, "load", lambda: settings)
    node.run("registry", "rebuild")
    assert node.json("registry", "status")["url"] == url
    with Catalogue(url) as catalogue:
        assert [one.node for one in catalogue.get("a").replicas] == ["gpu-7"]


def test_check_names_what_differs(node: Node, url: str) -> None:
    for name in "abc":
        save(node.checkpoints / name, container=name)
    node.run("registry", "rebuild", "--url", url)
    with Catalogue(url) as catalogue:
        catalogue.label("a", {"team": "x"})
    shutil.rmtree(node.checkpoints / "a")
    (node.checkpoints / "b" / NAME).write_text("{")
    lines = node.run("registry", "check", "--url", url, status=1).stdout.splitlines()
    assert lines[0] == "2 images, 1 damaged; 2 differ"
    assert [line.split()[0] for line in lines[2:]] == ["gone", "changed"]
    assert "state" in lines[3]


def test_check_and_status_change_nothing_that_is_registered(node: Node, url: str) -> None:
    save(node.checkpoints / "a")
    node.run("registry", "status", "--url", url)
    node.run("registry", "check", "--url", url, status=1)
    assert node.json("registry", "status", "--url", url)["images"] == 0


def test_registry_that_cannot_be_used_is_reported(node: Node, tmp_path: Path) -> None:
    (tmp_path / "r.db").write_bytes(b"no database" * 100)
    shown = node.run("registry", "status", "--url", f"sqlite:///{tmp_path}/r.db", status=1).stderr
    assert "is damaged: file is not a database" in shown
    assert "kybernate registry rebuild" in shown
    assert "absolute path" in node.run("registry", "status", "--url", "sqlite:///r.db", status=1).stderr


def test_missing_libraries_are_named(node: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kybernate.registry.catalogue")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    for name in [name for name in sys.modules if name.startswith("kybernate.registry.") and "location" not in name]:
        monkeypatch.delitem(sys.modules, name)
    shown = node.run("registry", "status", "--url", url, status=6).stderr
    assert "needs sqlalchemy, which is not installed" in shown
    assert "pip install 'kybernate[agent]'" in shown


def labelled(node: Node, url: str, name: str, **source: Any) -> Path:
    directory = node.checkpoints / name
    save(directory, **source)
    node.run("registry", "rebuild", "--url", url)
    with Catalogue(url) as catalogue:
        catalogue.label(str(directory), {"team": "x"})
    assert (directory / REGISTRY).stat().st_mode & 0o777 == 0o600
    return directory


def test_what_lies_beside_an_image_is_no_part_of_it(node: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [])  # CRIU has not written it
    directory = labelled(node, url, "a")
    (directory / f".{REGISTRY}.tmp").write_text("left by a kill")
    node.run("inspect", "a", "--verify")
    assert node.json("images", "a")[0]["usable"]
    (directory / "other.json").write_text("{}")
    shown = node.run("inspect", "a", "--verify", status=1).stdout
    assert [line.split()[:2] for line in shown.splitlines()[1:]] == [["other.json", "extra"]]


def test_labels_survive_an_import_in_place(node: Node, url: str) -> None:
    labelled(node, url, "a", signed=False)
    node.run("import", "a", "--yes")
    node.run("registry", "rebuild", "--url", url)
    with Catalogue(url) as catalogue:
        (image,) = catalogue.list().images
    assert (image.annotations.labels, image.replicas[0].findings) == ({"team": "x"}, ())


def test_import_leaves_labels_of_elsewhere_behind(node: Node, url: str, tmp_path: Path) -> None:
    directory = labelled(node, url, "a")
    shutil.copytree(directory, tmp_path / "elsewhere" / "b")
    node.run("import", str(tmp_path / "elsewhere" / "b"), "--yes")
    assert not (node.checkpoints / "b" / REGISTRY).exists()


@pytest.mark.parametrize("name", [REGISTRY, f".{REGISTRY}.tmp"])
def test_manifest_cannot_list_the_registrys_file(node: Node, name: str) -> None:
    save(node.checkpoints / "a")
    text = (node.checkpoints / "a" / NAME).read_text()
    (node.checkpoints / "a" / NAME).write_text(text.replace('"core-1.img"', f'"{name}"'))
    assert "is not the name of a file in the manifest's directory" in node.json("images", "a")[0]["reason"]


def test_directory_that_cannot_be_looked_into_is_no_agreement(
    node: Node, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.run("registry", "rebuild", "--url", url)
    unreadable = Rebuilt(0, 0, (), unreadable={Path("/images/shop"): "Input/output error"})
    monkeypatch.setattr(Catalogue, "check", lambda self, artefacts, progress: unreadable)
    said = node.run("registry", "check", "--url", url, status=1).stderr.splitlines()[-1]
    assert "/images/shop cannot be looked into: Input/output error" in said


@pytest.mark.parametrize(
    ("verdicts", "said", "status"),
    [(("ok", "note", "bad"), "bad: subject 2", 1), (("ok", "note", "note"), "ok, with 2 notes", 0), (("ok",), "ok", 0)],
)
def test_last_line_of_doctor_is_the_worst(
    node: Node, monkeypatch: pytest.MonkeyPatch, verdicts: tuple[Verdict, ...], said: str, status: int
) -> None:
    found = [HealthFinding(f"subject {number}", verdict, "as found") for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(examination, "examine", lambda fix: found)
    assert node.run("doctor", status=status).stdout.splitlines()[-1] == said
