"""A node with images on disk, and ways to damage them and their rows, with what is true of them kept in memory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import delete, insert, select, update

from kybernate.registry.artefacts import Artefacts
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import Annotations, ReplicaState
from kybernate.registry.schema import IMAGE, LABEL, METADATA, REPLICA
from kybernate_shim.checkpoint.image.manifest import NAME, REGISTRY
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import Key, signing_key
from tests.fakes.images import write_image

NODE = "node-a"
Truth = tuple[str, ReplicaState, dict[str, str], bool]  # id, state, labels, whether pinned


@dataclass
class Copy:
    """What is true of a directory: whether manifest and the file next to it are whole, and the image's state."""

    number: int
    manifest: bool = True
    beside: bool = True
    state: ReplicaState = "complete"


@dataclass
class World:
    """Images of one node. `rows` says of which images the annotations in the database are whole."""

    root: Path
    key: Key
    config: Config
    copies: dict[Path, Copy] = field(default_factory=dict)
    rows: dict[int, bool] = field(default_factory=dict)

    @property
    def artefacts(self) -> Artefacts:
        return Artefacts(self.config, NODE)

    def place(self, number: int) -> Path:
        return self.root / "images" / "shop" / f"image-{number}"

    def make(self, number: int) -> Path:
        """Write an image that the registry does not know yet."""
        place = self.place(number)
        write_image(place, self.key, id=f"id-{number}", namespace="shop", pod=f"web-{number}", name="app")
        self.copies[place] = Copy(number, beside=False)
        return place

    def add(self, catalogue: Catalogue, number: int) -> None:
        """Write an image, and let the registry keep labels of it; every other one is pinned."""
        place = self.make(number)
        found = self.artefacts.look(place)
        assert found is not None
        labels = {"number": str(number), "even": str(number % 2 == 0)}
        catalogue.add(replace(found.row, annotations=Annotations(labels=labels, pinned=number % 2 == 0)))
        self.copies[place].beside = self.rows[number] = True

    def truth(self) -> dict[str, Truth]:
        """Return what a rebuild has to find in each place."""
        known = {one.number for one in self.copies.values() if one.manifest and one.beside}
        known |= {number for number, whole in self.rows.items() if whole}
        found = {}
        for place, one in self.copies.items():
            if not one.manifest and not one.beside and not (place / NAME).exists():
                continue  # a directory with some files
            labelled = one.beside or (one.manifest and one.number in known)
            labels = {"number": str(one.number), "even": str(one.number % 2 == 0)} if labelled else {}
            id = f"id-{one.number}" if one.manifest or one.beside else ""
            found[str(place)] = (id, one.state, labels, labelled and one.number % 2 == 0)
        return found

    # ---- damage to artefacts; each takes the directory of an image

    def remove(self, place: Path) -> None:
        shutil.rmtree(place)
        del self.copies[place]

    def truncate(self, place: Path) -> None:
        (place / "pages-1.img").write_bytes(b"short")
        self.copies[place].state = "damaged"

    def lose_manifest(self, place: Path) -> None:
        (place / NAME).unlink(missing_ok=True)
        self.copies[place].manifest, self.copies[place].state = False, "damaged"

    def tear_manifest(self, place: Path) -> None:
        (place / NAME).write_text("{")
        self.copies[place].manifest, self.copies[place].state = False, "damaged"

    def lose_beside(self, place: Path) -> None:
        (place / REGISTRY).unlink(missing_ok=True)
        self.copies[place].beside = False

    def tear_beside(self, place: Path) -> None:
        (place / REGISTRY).write_text('{"format": 1, "image": ')
        self.copies[place].beside = False

    def open_beside(self, place: Path) -> None:
        (place / REGISTRY).touch()
        (place / REGISTRY).chmod(0o666)
        self.copies[place].beside = False

    def copy(self, place: Path) -> None:
        target = place.with_name(f"{place.name}-copy")
        if target not in self.copies:
            shutil.copytree(place, target)
            self.copies[target] = replace(self.copies[place])

    def move(self, place: Path) -> None:
        target = place.with_name(f"{place.name}-moved")
        if target not in self.copies:
            place.rename(target)
            self.copies[target] = self.copies.pop(place)


ARTEFACTS = (
    World.remove, World.truncate, World.lose_manifest, World.tear_manifest, World.lose_beside, World.tear_beside,
    World.open_beside, World.copy, World.move,
)  # fmt: skip


class Rows:
    """Damage to the rows of an image, by what a stray statement could do."""

    def __init__(self, world: World, catalogue: Catalogue) -> None:
        self._world, self._database = world, catalogue.database

    def _execute(self, statement: Any, *values: Any) -> Any:
        return self._database.write(lambda connection: connection.execute(statement, *values))

    def _image(self, number: int) -> dict[str, Any] | None:
        statement = select(IMAGE).where(IMAGE.c.id == f"id-{number}").order_by(IMAGE.c.key)
        rows = self._database.read(lambda connection: list(connection.execute(statement).mappings()))
        return dict(rows[0]) if rows else None

    def delete_image(self, number: int) -> None:
        if image := self._image(number):
            self._execute(delete(REPLICA).where(REPLICA.c.image == image["key"]))
            self._execute(delete(IMAGE).where(IMAGE.c.key == image["key"]))
            self._world.rows[number] = False

    def delete_replica(self, number: int) -> None:
        self._execute(delete(REPLICA).where(REPLICA.c.name.like(f"%image-{number}%")))

    def mangle_facts(self, number: int) -> None:
        if image := self._image(number):
            values = {"pod": "x", "bytes": 1, "created": 0, "gpus": "?", "pinned": True, "workload": "", "revision": 9}
            self._execute(update(IMAGE).where(IMAGE.c.key == image["key"]).values(values))

    def mangle_annotations(self, number: int) -> None:
        if image := self._image(number):
            text = image["annotations"].replace("number", "forged").replace('"revision": ', '"revision": 9')
            self._execute(update(IMAGE).where(IMAGE.c.key == image["key"]).values(annotations=text))
            self._world.rows[number] = False

    def mangle_labels(self, number: int) -> None:
        if image := self._image(number):
            self._execute(delete(LABEL).where(LABEL.c.key == image["key"], LABEL.c.name == "even"))
            self._execute(update(LABEL).where(LABEL.c.key == image["key"]).values(value="forged"))

    def mangle_replica(self, number: int) -> None:
        values = {"tier": "moon", "state": "missing", "revision": 77, "findings": "[", "verified": 5}
        self._execute(update(REPLICA).where(REPLICA.c.name.like(f"%image-{number}%")).values(values))

    def duplicate(self, number: int) -> None:
        if (image := self._image(number)) and not image["key"].endswith("-twice"):
            key = f"{image['key'][:60]}-twice"
            self._execute(delete(REPLICA).where(REPLICA.c.key == key[:64]))
            self._execute(delete(IMAGE).where(IMAGE.c.key == key))
            self._execute(insert(IMAGE), {**image, "key": key})
            replica = {
                "key": key[:64], "image": key, "node": NODE, "place": f"/gone/{number}", "tier": "disk",
                "name": "twice", "state": "complete", "bytes": 1, "verified": None, "findings": "[]", "reason": "",
                "revision": 0,
            }  # fmt: skip
            self._execute(insert(REPLICA), replica)

    def orphan(self, number: int) -> None:
        if image := self._image(number):
            key = f"{image['key'][:60]}-orphan"
            self._execute(delete(IMAGE).where(IMAGE.c.key == key))
            self._execute(insert(IMAGE), {**image, "key": key})


ROWS = (
    Rows.delete_image, Rows.delete_replica, Rows.mangle_facts, Rows.mangle_annotations, Rows.mangle_labels,
    Rows.mangle_replica, Rows.duplicate, Rows.orphan,
)  # fmt: skip


def new_world(root: Path) -> World:
    """Return a node without images, with a key of its own."""
    config = replace(
        Config(), checkpoint_root=root / "images", key_directory=root / "keys", audit_log=None, trusted_roots=()
    )
    (root / "images").mkdir(mode=0o700)
    return World(root, signing_key(config), config)


def contents(catalogue: Catalogue) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables."""

    def work(connection: Any) -> dict[str, list[tuple[Any, ...]]]:
        return {
            table.name: sorted(tuple(row) for row in connection.execute(select(table)))
            for table in METADATA.sorted_tables
        }

    return catalogue.database.read(work)


def registered(catalogue: Catalogue) -> dict[str, Truth]:
    """Return what the registry says of each place."""
    found = {}
    for one in catalogue.list().images:
        for replica in one.replicas:
            kept = one.annotations
            found[replica.place] = (one.id, replica.state, dict(kept.labels), kept.pinned)
    return found
