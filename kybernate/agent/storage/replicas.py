"""Copies of images in the registry: those that a name means, and those in an object store.

Which node put an image into an object store does not matter: all of them see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kybernate.agent.storage.named import TierCopy
from kybernate.agent.storage.node_tiers import DISK, RAM
from kybernate.node.failure import Missing, Refused
from kybernate.node.images import places_called
from kybernate.node.naming import the_only
from kybernate.registry.artefacts import Artefacts, described
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import ImageRow, RegisteredCopy, Replica
from kybernate.store.tiers.tier import Held, Ref
from kybernate_shim.checkpoint.image.locate import NAME
from kybernate_shim.checkpoint.image.manifest import decode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config

MOST_RELATED = 1000
NO_NODE = ""  # holds what is in an object store


class Replicas:
    """Asks and changes the catalogue. All methods block, and raise Failure where the registry does not answer.

    `changed` gets each directory whose image was registered, or forgotten, because it was named. `store` returns the
    URL of the node's object store: copies in others are not reached, "" for all.
    """

    def __init__(
        self,
        catalogue: Callable[[], Catalogue],
        config: Callable[[], Config],
        changed: Callable[[Path], object] = lambda directory: None,
        store: Callable[[], str] = lambda: "",
    ) -> None:
        self._catalogue, self._config, self._changed, self._store = catalogue, config, changed, store

    def copies_of(self, name: str) -> list[TierCopy]:
        """Return all copies that a name means, wherever they are. What lies on this node is registered before.

        Raises as Catalogue.copies.
        """
        self.look_for(name)
        return list(map(self._copy_of, self._catalogue().copies(name)))

    def look_for(self, name: str) -> None:
        """Register what lies on this node under a name, as after a pull, or where it was moved by hand.

        Of the images that the name means, copies on this node that are not there any more are forgotten.
        """
        config, catalogue = self._config(), self._catalogue()
        artefacts = Artefacts(config, catalogue.node)
        try:
            places = [path for path in places_called(name, config) if _is_below_a_root(path, config)]
            known = {copy.replica.place: copy.row.key for copy in catalogue.copies(name) if self._is_here(copy.replica)}
            for path in dict.fromkeys((*places, *map(Path, known))):
                found = artefacts.look(path)
                if found is not None and known.get(str(path)) != found.row.key:
                    catalogue.add(found.row)
                    self._changed(path)
            named = {copy.row.key: copy.row for copy in catalogue.copies(name)}
            for replica in (one for row in named.values() for one in row.replicas if self._is_here(one)):
                if artefacts.look(Path(replica.place)) is None:
                    catalogue.drop_replica(replica.place)
                    self._changed(Path(replica.place))
        except Refused:
            return  # what is registered still answers

    def _is_here(self, replica: Replica) -> bool:
        return replica.node == self._catalogue().node and replica.place.startswith("/")

    def image_of(self, name: str) -> Path | None:
        """Return the directory of the image that a name means on this node, None where it means none.

        Of an image that is on the disk and in memory under one name, it is the one on the disk. Raises Ambiguous.
        """
        here = [copy for copy in self.copies_of(name) if copy.is_here]
        if not here:
            return None
        disk = [copy for copy in here if copy.tier != RAM]
        names = {copy.ref.path for copy in disk if copy.tier}
        found = [*disk, *(copy for copy in here if copy.tier == RAM and copy.ref.path not in names)]
        return Path(the_only(name, [copy.place for copy in found]))

    def _copy_of(self, copy: RegisteredCopy) -> TierCopy:
        row, replica = copy.row, copy.replica
        namespace, name, tier = row.source.namespace, replica.name, ""
        whole = replica.state == "complete"
        if replica.node == NO_NODE:
            url, _, inside = replica.place.rpartition("#")
            first = inside.partition("/")[0]
            reached = self._store() in ("", url)
            namespace, tier, whole = "" if first == "-" else first, replica.tier if reached else "", whole and reached
        elif replica.node == self._catalogue().node:
            for tier_name, root in _roots(self._config()):
                if replica.place.startswith(f"{root}/"):
                    first, slash, rest = replica.place.removeprefix(f"{root}/").partition("/")
                    namespace, name, tier = (first, rest, tier_name) if slash else ("", first, tier_name)
        ref, is_here = Ref(namespace, name, row.id), self._is_here(replica)
        return TierCopy(row, ref, tier, replica.place, is_here=is_here, whole=whole)

    def elsewhere(self, namespace: str, name: str, words: Collection[str]) -> list[tuple[str, ImageRow]]:
        """Return images of a namespace that can be brought to this node, with their names there, newest first.

        Those of a pod, a pod's uid or an origin among `words`, and those of the origin of the images called `name`.
        """
        rows = self._catalogue().related(namespace, name, words, most=MOST_RELATED)
        copies = [self._copy_of(RegisteredCopy(row, replica)) for row in rows for replica in row.replicas]
        found = {
            (copy.ref.name, copy.row.id): copy.row
            for copy in copies
            if copy.is_elsewhere and copy.ref.namespace == namespace and NAME.fullmatch(copy.ref.name)
        }
        return [(name, row) for (name, _), row in found.items()]

    def other_nodes(self, ref: Ref) -> list[str]:
        """Return the nodes that have a whole copy of an image, without this one."""
        rows = [copy for copy in self._catalogue().copies(ref.id or ref.path) if copy.row.id == ref.id or not ref.id]
        return sorted({copy.replica.node for copy in rows if self._is_of_another_node(copy.replica)})

    def _is_of_another_node(self, one: Replica) -> bool:
        return one.node not in (NO_NODE, self._catalogue().node) and one.state == "complete"

    def stored(self, tier: str, held: Held, manifest: bytes) -> None:
        """Note that an object store has an image, of which this node may have no copy."""
        row = self.row_of_stored(tier, held, manifest)
        copy = replace(row.replicas[0], verified=datetime.now(UTC))
        self.add(replace(row, replicas=(copy,)))

    def row_of_stored(self, tier: str, held: Held, manifest: bytes) -> ImageRow:
        """Return what is registered of an image in an object store. Raises ManifestInvalid."""
        image = Image(Path(held.place), decode(manifest), content=manifest)
        copy = Replica(NO_NODE, held.place, tier, held.ref.name, bytes=held.bytes)
        return replace(described(image.manifest), key=image.digest, replicas=(copy,))

    def add(self, row: ImageRow) -> ImageRow:
        """Register an image, or a further copy of it; return what is registered then."""
        return self._catalogue().add(row)

    def places_below(self, url: str) -> set[str]:
        """Return where the registry knows images of the store at `url`."""
        return {place for place in self._catalogue().places(NO_NODE) if place.startswith(f"{url}#")}

    def without_origin(self) -> set[str]:
        """Return where the registry knows images of object stores without their lineage."""
        return set(self._catalogue().places_without_origin(NO_NODE))

    def gone(self, held: Held) -> None:
        """Note that an object store no longer has it."""
        self.gone_from(held.place)

    def gone_from(self, place: str) -> None:
        """Note that an object store no longer has the image at a place."""
        try:
            self._catalogue().drop_replica(place, node=NO_NODE)
        except Missing:
            pass


def _roots(config: Config) -> list[tuple[str, Path]]:
    memory = [(RAM, config.memory_root)] if config.memory_root else []
    return [*memory, (DISK, config.checkpoint_root)]


def _is_below_a_root(path: Path, config: Config) -> bool:
    return any(path.is_relative_to(root) and path != root for root, _ in config.image_roots)
