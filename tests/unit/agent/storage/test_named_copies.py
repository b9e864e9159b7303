"""What a person names is what is moved or removed, and nothing is where the name means several copies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.named import to_copy, to_evict
from kybernate.agent.storage.node_tiers import DISK, OBJECT, RAM, NodeTiers
from kybernate.agent.storage.replicas import Replicas
from kybernate.agent.tier_settings import Tiers
from kybernate.node.deleting import delete_with_copy
from kybernate.node.failure import Ambiguous, Failure, Missing, NoImage
from kybernate.registry.artefacts import Artefacts
from kybernate.registry.catalogue import Catalogue
from kybernate.store import images
from kybernate.store.keys import make_key
from kybernate.store.movement.turns import Turns
from kybernate.store.place import StorePlace, open_store
from kybernate.store.transfer import Transfer
from kybernate.verbs.attempt import Attempt
from kybernate.verbs.copy import Copy
from kybernate.verbs.delete import Delete
from kybernate.verbs.evict import Evict
from kybernate.verbs.model import Operation, Target
from kybernate.verbs.node import Movement, Node
from kybernate.verbs.verify import Verify
from kybernate_shim.checkpoint.image.counter import Counter
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.encrypted import CipherRun
from kybernate_shim.checkpoint.image.encryption_in_place import encrypt_image
from kybernate_shim.checkpoint.image.manifest import NAME, decode, encode
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import write_manifest
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import Key, signing_key
from tests.fakes.images import write_image

IDS: Final = ("11111111-aaaa", "11111111-bbbb", "22222222-cccc")
NODE: Final = "node-1"
Wanted = Copy | Evict | Delete | Verify


@dataclass(frozen=True)
class Made:
    """A directory with an image: the tier and the name below its root, the image's id, and another manifest of it."""

    tier: str
    path: str
    id: str
    changed: bool = False


class World:
    """The images of a node with memory, disk and a store, and what acts on them for an agent."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.roots = {RAM: place / "ram", DISK: place / "disk"}
        for root in self.roots.values():
            root.mkdir(mode=0o700)
        self.config = replace(
            Config(), checkpoint_root=self.roots[DISK], memory_root=self.roots[RAM], key_directory=place / "keys",
            audit_log=None,
        )  # fmt: skip
        self.key = signing_key(self.config)
        make_key(place / "store.key")
        self.store = StorePlace(f"file://{place}/store", place / "store.key")
        self.settings = StoreSettings(url=self.store.url, key=self.store.key, level=0)
        self.catalogue = Catalogue(f"sqlite:///{place}/registry.db", node=NODE)
        self.replicas = Replicas(lambda: self.catalogue, lambda: self.config, store=lambda: self.settings.url)

    def close(self) -> None:
        self.catalogue.close()
        shutil.rmtree(self.place)

    def make(self, made: Made) -> None:
        """Write an image; all directories with one id have the same files, and the same manifest unless `changed`."""
        pattern = self.place / "patterns" / made.id
        namespace = made.path.partition("/")[0] if "/" in made.path else ""
        if not pattern.exists():
            write_image(pattern, self.key, id=made.id)
        target = self.roots[made.tier] / made.path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copytree(pattern, target)
        manifest = decode((target / NAME).read_bytes())
        source = replace(manifest.source, namespace=namespace, image="another" if made.changed else "one")
        with Digester("xxh128") as digester:
            files = digester.files(target, [file.name for file in manifest.files])
        (target / NAME).write_bytes(encode(replace(manifest, source=source, files=files)))

    def rebuild(self) -> None:
        self.catalogue.rebuild(Artefacts(self.config, NODE))

    def directories(self) -> frozenset[Path]:
        return frozenset(path.parent for root in self.roots.values() for path in root.rglob(NAME))

    @asynccontextmanager
    async def tiers(self) -> AsyncIterator[NodeTiers]:
        (await open_store(self.store).open(create=True)).close()
        tiers = NodeTiers(lambda: self.config, lambda: self.settings, Tiers, self.place)
        try:
            yield tiers
        finally:
            tiers.close()

    async def stored(self) -> frozenset[tuple[str, str, str]]:
        async with self.tiers() as tiers:
            return frozenset([astuple(held.ref) async for held in (await tiers.object()).images()])

    def put(self, directory: Path) -> None:
        """Store an image as `kybernate store put` does, and let the agent look at the store."""

        async def work() -> None:
            store = await open_store(self.store).open(create=True)
            try:
                await images.put(store, directory, Transfer())
            finally:
                store.close()
            async with self.tiers() as tiers:
                async for held in (await tiers.object()).images():
                    source = await (await tiers.object()).open(held.ref)
                    self.replicas.stored(OBJECT, held, source.manifest)

        asyncio.run(work())

    def node(self, tiers: NodeTiers) -> Node:
        def ref_of(wanted: Copy | Evict) -> tuple[str, str, str]:
            copies = self.replicas.copies_of(wanted.image)
            if isinstance(wanted, Evict):
                return astuple(to_evict(wanted.image, wanted.tier, copies))
            return astuple(to_copy(wanted.image, wanted.tier, tiers.names(), copies, demote=wanted.demote))

        return Node("", image_of=self.replicas.image_of, ref_of=ref_of, tiers=tiers.names)

    async def act(self, wanted: Wanted) -> Target:
        """Carry out a request as the agent does, and return what it was about."""
        async with self.tiers() as tiers:
            changed: list[Path] = []
            movement = Movement(tiers, Turns(), self.replicas, lambda: self.settings, changed.append)
            node = replace(self.node(tiers), movement=movement)
            target = await asyncio.to_thread(wanted.resolve, node, "op")
            if isinstance(wanted, Copy | Evict):
                operation = Operation("op", wanted, target, 0.0)
                attempt = Attempt(operation, node, lambda report: None, None)  # type: ignore[arg-type]  # uses no thread
                await wanted.execute(attempt)
                for directory in changed:
                    self.replicas.look_for(str(directory))
            elif isinstance(wanted, Delete):
                delete_with_copy(Path(target.image), "op", self.config)
            return target


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "world").mkdir()
    found = World(tmp_path / "world")
    monkeypatch.setattr(Config, "load", classmethod(lambda cls: found.config))
    yield found
    found.close()


def act(world: World, wanted: Wanted) -> Target:
    return asyncio.run(world.act(wanted))


ORIG, A, B = (Made(DISK, name, IDS[2]) for name in ("orig", "a", "b"))


@pytest.fixture
def three(world: World) -> World:
    """Three directories with one image, which the store has, too."""
    for made in (ORIG, A, B):
        world.make(made)
    world.rebuild()
    world.put(world.roots[DISK] / "orig")
    return world


@pytest.mark.parametrize("name", ["b", "{disk}/b", "{disk}/b/"])
@pytest.mark.parametrize("demote", [False, True])
def test_copy_that_is_named_leaves_and_no_other(three: World, name: str, demote: bool) -> None:
    disk = three.roots[DISK]
    name = name.format(disk=disk)
    act(three, Copy(name, OBJECT, demote=True) if demote else Evict(name, DISK))
    assert three.directories() == {disk / "orig", disk / "a"}
    assert [copy.place for copy in three.replicas.copies_of("b")] == []


@pytest.mark.parametrize(
    "wanted",
    [Evict(IDS[2], DISK), Copy(IDS[2], OBJECT, demote=True), Copy("2222", RAM), Delete(IDS[2]), Verify("2222")],
)
def test_name_of_several_copies_does_nothing_and_lists_them(
    three: World, wanted: Evict | Copy | Delete | Verify
) -> None:
    before, stored = three.directories(), asyncio.run(three.stored())
    with pytest.raises(Ambiguous, match="is the name of") as caught:
        act(three, wanted)
    assert all(str(path) in str(caught.value) for path in three.directories())
    assert (three.directories(), asyncio.run(three.stored())) == (before, stored)


def test_copy_of_another_name_in_the_store_stays(three: World) -> None:
    with pytest.raises(NoImage, match="no copy named 'a' is in tier object"):
        act(three, Evict("a", OBJECT))
    act(three, Evict(f"{three.store.url}#-/{IDS[2]}", OBJECT))
    assert asyncio.run(three.stored()) == frozenset()
    assert len(three.directories()) == 3


def test_copy_in_another_store_is_not_taken_for_the_one_here(three: World) -> None:
    three.settings = replace(three.settings, url=f"file://{three.place}/another")
    for wanted in (Evict("orig", OBJECT), Evict(f"{three.store.url}#-/{IDS[2]}", OBJECT)):
        with pytest.raises(NoImage, match="in none of them"):
            act(three, wanted)
    three.settings = replace(three.settings, url=three.store.url)
    act(three, Evict("orig", OBJECT))


def test_promoted_image_has_the_name_that_was_given(three: World) -> None:
    act(three, Copy("b", RAM))
    assert (three.roots[RAM] / "b" / NAME).exists()
    act(three, Evict("b", RAM))
    assert three.directories() == {three.roots[DISK] / name for name in ("orig", "a", "b")}


def test_another_manifest_of_the_id_is_no_other_copy(world: World) -> None:
    world.make(Made(DISK, "plain", IDS[0]))
    world.make(Made(DISK, "changed", IDS[0], changed=True))
    world.rebuild()
    world.put(world.roots[DISK] / "plain")
    with pytest.raises(Failure, match="another manifest"):
        act(world, Evict("changed", DISK))
    with pytest.raises(Failure, match="another manifest"):
        act(world, Copy("changed", OBJECT, demote=True))
    with pytest.raises(Failure, match="one of them is encrypted, or was changed"):
        world.put(world.roots[DISK] / "changed")
    assert world.directories() == {world.roots[DISK] / name for name in ("plain", "changed")}


def signed_again(world: World, directory: Path, algorithm: str, key: Key) -> None:
    """Give an image the manifest that an import makes: other digests, and a signature."""
    manifest = decode((directory / NAME).read_bytes())
    with Digester(algorithm) as digester:
        files = digester.files(directory, [file.name for file in manifest.files])
    write_manifest(directory, sign(replace(manifest, files=files), key))


def test_copy_that_was_signed_again_stands_for_the_other_if_its_key_is_valid(three: World) -> None:
    disk = three.roots[DISK]
    for name, algorithm in (("orig", "xxh128"), ("a", "blake3"), ("b", "blake3")):
        signed_again(three, disk / name, algorithm, three.key)
    three.rebuild()
    three.put(disk / "orig")
    act(three, Evict("b", DISK))
    assert three.directories() == {disk / "orig", disk / "a"}
    signed_again(three, disk / "orig", "xxh128", Key(b"f" * 32, three.place / "foreign"))
    three.put(disk / "orig")
    with pytest.raises(Failure, match="is signed by key"):
        act(three, Copy("a", OBJECT, demote=True))
    assert three.directories() == {disk / "orig", disk / "a"}


def test_encrypted_copy_is_compared_before_another_one_leaves(world: World) -> None:
    key = world.place / "image.key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    world.config = replace(world.config, encryption_key=key)
    world.make(Made(DISK, "web", IDS[0]))
    disk, memory = (world.roots[tier] / "web" for tier in (DISK, RAM))
    manifest = decode((disk / NAME).read_bytes())
    write_manifest(disk, sign(manifest, world.key))
    encrypt_image(disk, key, world.config, CipherRun(Counter(lambda done: None)))
    shutil.copytree(disk, memory)
    whole = (disk / "pages-1.img.enc").read_bytes()
    (disk / "pages-1.img.enc").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    world.rebuild()
    with pytest.raises(Failure, match=r"pages-1\.img\.enc"):
        act(world, Evict("web", RAM))
    (disk / "pages-1.img.enc").write_bytes(whole)
    world.config = replace(world.config, encryption_key=None)
    with pytest.raises(Failure, match="cannot be compared with its manifest"):
        act(world, Evict("web", RAM))
    world.config = replace(world.config, encryption_key=key)
    act(world, Evict("web", RAM))
    assert world.directories() == {disk}


def test_image_named_like_the_id_of_another_is_not_taken_for_it(world: World) -> None:
    world.make(Made(DISK, "web", IDS[0]))
    world.make(Made(DISK, IDS[0], IDS[1]))
    world.rebuild()
    for wanted in (Delete(IDS[0]), Evict(IDS[0], DISK), Verify(IDS[0])):
        with pytest.raises(Ambiguous, match="is the name of"):
            act(world, wanted)
    assert act(world, Delete(f"{world.roots[DISK]}/{IDS[0]}")).image.endswith(IDS[0])
    assert world.directories() == {world.roots[DISK] / "web"}


def test_image_is_known_as_soon_as_it_is_named(world: World) -> None:
    """It was pulled, or moved by hand; and what was moved away is forgotten."""
    world.make(Made(DISK, "team/moved", IDS[0]))
    with pytest.raises(Missing, match=r"registry has no image|was removed"):
        world.catalogue.get("moved")
    for name in ("moved", "team/moved", f"{world.roots[DISK]}/team/moved"):
        assert world.replicas.image_of(name) == world.roots[DISK] / "team/moved"
    world.catalogue.pin(IDS[0])
    (world.roots[DISK] / "team/moved").rename(world.roots[DISK] / "team/again")
    assert world.replicas.image_of("again") == world.roots[DISK] / "team/again"
    world.catalogue.label("again", {"a": "b"})  # which is written with every copy that is known here
    assert world.replicas.image_of("moved") is None
    row = world.catalogue.get(IDS[0])
    assert (row.names, row.annotations.pinned) == (("again",), True)


def test_image_outside_of_the_tiers_is_not_moved(world: World) -> None:
    trusted = world.place / "trusted"
    world.config = replace(world.config, trusted_roots=(trusted,))
    world.make(Made(DISK, "web", IDS[0]))
    trusted.mkdir()
    (world.roots[DISK] / "web").rename(trusted / "web")
    world.rebuild()
    with pytest.raises(Failure, match="in no tier of this node"):
        act(world, Copy(IDS[0], RAM))
    assert act(world, Verify(str(trusted / "web"))).image == str(trusted / "web")


# ---- whatever there is, and whatever is named

PATHS: Final = ("a", "b", "team/a", "team/b", IDS[0])
MADE: Final = st.builds(  # mostly copies of one image
    Made, st.sampled_from([RAM, DISK]), st.sampled_from(PATHS), st.sampled_from([*IDS, IDS[0], IDS[0]]),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
NAMES: Final = st.sampled_from([*PATHS, *IDS, "1111", "2222", "{disk}/a", "{ram}/a", "nothing"])
OWN: Final = st.sampled_from(["{path}", "{name}", "{path}", "{id}", "{beginning}", "{root}/{path}"])
ACTIONS: Final = st.sampled_from(["evict ram", "evict disk", "evict object", "demote disk", "demote object", "delete"])
PLACES = count()


def called(world: World, name: str, directory: Path) -> bool:
    """Return whether a name means a directory, as the documentation has it."""
    if name.startswith("/"):
        return directory == Path(name)
    root = next(root for root in world.roots.values() if directory.is_relative_to(root))
    path = str(directory.relative_to(root))
    id = decode((directory / NAME).read_bytes()).id
    beginning = not any(name in (one.name, path) for one in world.directories()) and id.startswith(name)
    return name in (path, path.partition("/")[2], id) or (len(name) >= 4 and beginning)


@settings(deadline=None, max_examples=60)
@given(made=st.lists(MADE, min_size=1, max_size=4, unique_by=lambda one: (one.tier, one.path)),
       puts=st.sampled_from([True, True, False]), damaged=st.sampled_from([False, False, True]),
       name=st.one_of(OWN, OWN, NAMES), action=ACTIONS)  # fmt: skip
def test_whatever_is_removed_was_named_and_is_left_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, made: list[Made], puts: bool, damaged: bool, name: str, action: str
) -> None:
    place = tmp_path_factory.getbasetemp() / f"named-{next(PLACES)}"
    place.mkdir()
    world = World(place)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Config, "load", classmethod(lambda cls: world.config))
            one, roots = made[0], {tier: str(root) for tier, root in world.roots.items()}
            own = {"path": one.path, "name": one.path.rpartition("/")[2], "id": one.id, "beginning": one.id[:4]}
            name = name.format(**roots, **own, root=roots[one.tier])
            _whatever(world, made, puts, damaged, name, action)
    finally:
        world.close()


def _whatever(world: World, made: list[Made], puts: bool, damaged: bool, name: str, action: str) -> None:
    for one in made:
        world.make(one)
    world.rebuild()
    if puts:
        world.put(world.roots[made[0].tier] / made[0].path)
    if damaged:
        broken = world.roots[made[-1].tier] / made[-1].path / "pages-1.img"
        broken.write_bytes(bytes(reversed(broken.read_bytes())))
    before, stored = world.directories(), asyncio.run(world.stored())
    manifests = {path: (path / NAME).read_bytes() for path in before}
    meant = {path for path in before if called(world, name, path)}
    verb, _, tier = action.partition(" ")
    wanted: Evict | Copy | Delete
    wanted = (
        Delete(name) if verb == "delete" else Evict(name, tier) if verb == "evict" else Copy(name, tier, demote=True)
    )
    try:
        act(world, wanted)
    except (Failure, OSError):
        assert before <= world.directories(), "something was removed by what has failed"
        assert stored <= asyncio.run(world.stored())
        event("refused")
        return
    after, left = world.directories(), asyncio.run(world.stored())
    gone = before - after
    event(f"{verb}: removed {len(gone)} directories, {len(stored - left)} of the store")
    assert gone <= meant, "something else was removed than what was named"
    assert len({_name_of(world, path) for path in gone}) <= 1
    if verb == "delete":
        assert gone
        assert stored <= left
        return
    for path in gone:
        whole = [other for other in after if (other / NAME).read_bytes() == manifests[path] and not verify(other)]
        in_store = any(id == decode(manifests[path]).id for _, _, id in left)
        assert whole or in_store, "the last good copy was removed"
    for _, removed, id in stored - left:
        assert (verb, tier) == ("evict", OBJECT)
        assert removed == name.rpartition("/")[2] or id.startswith(name)
        assert any(decode((path / NAME).read_bytes()).id == id and not verify(path) for path in after)


def _name_of(world: World, path: Path) -> str:
    root = next(root for root in world.roots.values() if path.is_relative_to(root))
    return str(path.relative_to(root))
