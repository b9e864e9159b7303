"""Images in an object store, in the registry: which node put them there does not matter, all of them see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kybernate.node.failure import Failure
from kybernate.registry.artefacts import described
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.failures import ImageNotRegistered
from kybernate.registry.model import ImageRow, Replica
from kybernate.store.tiers.tier import Held, Ref
from kybernate_shim.checkpoint.image.manifest import decode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config

NO_NODE = ""  # holds what is in an object store


class ImageOutside(Failure):
    """The image lies where no tier is: below a trusted root, or in a directory of its own."""

    advice = "`kybernate import` takes it over"


class Replicas:
    """Asks and changes the catalogue. All methods block, and raise Failure where the registry does not answer."""

    def __init__(self, catalogue: Callable[[], Catalogue], config: Callable[[], Config]) -> None:
        self._catalogue, self._config = catalogue, config

    def row_of(self, name: str) -> ImageRow:
        """Return what the registry knows of an image. Raises as Catalogue.get."""
        return self._catalogue().get(name)

    def is_elsewhere(self, row: ImageRow, *, stored: bool) -> bool:
        """Return whether the object store, or also another node where it need not be `stored`, has a whole copy."""
        return any(_is_stored(one) or (not stored and self._is_of_another_node(one)) for one in row.replicas)

    def ref_elsewhere(self, row: ImageRow) -> Ref:
        """Return what other nodes and the object store know an image by."""
        elsewhere = [one for one in row.replicas if _is_stored(one) or self._is_of_another_node(one)]
        return Ref(row.source.namespace, elsewhere[0].name, row.id)

    def ref_of(self, name: str) -> Ref:
        """Return what a tier knows an image by. Raises ImageOutside, and as Catalogue.get."""
        row = self.row_of(name)
        roots = [root for root, trusted in self._config().image_roots if not trusted]
        for replica in row.replicas:
            for root in roots:
                if replica.place.startswith(f"{root}/"):
                    first, slash, rest = replica.place.removeprefix(f"{root}/").partition("/")
                    return Ref(first, rest, row.id) if slash else Ref("", first, row.id)
        if self.is_elsewhere(row, stored=False):
            return self.ref_elsewhere(row)
        raise ImageOutside(f"{name} is in no tier of this node: {', '.join(one.place for one in row.replicas)}")

    def other_nodes(self, ref: Ref) -> list[str]:
        """Return the nodes that have a whole copy of an image, without this one."""
        try:
            row = self._catalogue().get(ref.id or ref.path)
        except ImageNotRegistered:
            return []
        return sorted({one.node for one in row.replicas if self._is_of_another_node(one)})

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

    def gone(self, held: Held) -> None:
        """Note that an object store no longer has it."""
        self.gone_from(held.place)

    def gone_from(self, place: str) -> None:
        """Note that an object store no longer has the image at a place."""
        try:
            self._catalogue().drop_replica(place, node=NO_NODE)
        except ImageNotRegistered:
            pass


def _is_stored(one: Replica) -> bool:
    return one.node == NO_NODE and one.state == "complete"
