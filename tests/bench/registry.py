"""What 10,000 images cost the registry: a page of a list, with filters or without, and making it again from the images.

The other side of a figure is what it may cost: 50 ms for the slowest of a hundred pages, with as many images as the
agent answers with where a caller names no limit, and 60 s for a rebuild. The images are small, but their manifests are
signed ones, with processes, mounts and features as a real container has them.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

from kybernate.agent.service.images import list_message
from kybernate.registry.artefacts import Artefacts
from kybernate.registry.beside import Beside, encode
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.model import EPOCH, Annotations, Filter
from kybernate_shim.checkpoint.image.manifest import REGISTRY
from kybernate_shim.config import Config
from kybernate_shim.linux.private_files import write_private
from kybernate_shim.trust.keys import signing_key
from tests.bench.figures import Pair, seconds
from tests.contract.registry.postgresql import postgresql
from tests.fakes.images import write_image

IMAGES = 10_000
NAMESPACES = 50
LISTS = 500
LIST_MS, REBUILD_SECONDS = 50.0, 60.0
KINDS = ("sqlite", "postgresql")
NAMES = tuple(f"registry.{what}.{kind}" for kind in KINDS for what in ("rebuild", "list"))
FILTERS = (
    Filter(),
    Filter(namespace="team-7"),
    Filter(pod="web-3"),
    Filter(workload="web-4"),
    Filter(source_image="registry.local/app:1"),
    Filter(tier="disk", pinned=True),
    Filter(labels={"stage": "warm"}),
    Filter(labels={"stage": "warm", "number": "76"}),
    Filter(namespace="team-9", labels={"stage": "cold"}, tier="disk"),
    Filter(namespace="absent"),
)


def pairs() -> Iterator[Pair]:
    """Yield the comparisons, over both databases."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="registry"))
        stack.callback(shutil.rmtree, directory)
        artefacts = _artefacts(directory)
        urls = {"sqlite": f"sqlite:///{directory}/registry.db", "postgresql": ""}
        for kind in KINDS:
            url = urls[kind] or stack.enter_context(postgresql()).database()
            catalogue = stack.enter_context(Catalogue(url))
            yield Pair(
                f"registry.rebuild.{kind}",
                lambda catalogue=catalogue: seconds(lambda: _rebuild(catalogue, artefacts)),  # type: ignore[misc]
                lambda: REBUILD_SECONDS,
                unit="s",
                within=1,
            )
            if catalogue.list(limit=1).total < IMAGES:
                catalogue.rebuild(artefacts)
            yield Pair(
                f"registry.list.{kind}",
                lambda catalogue=catalogue: _slowest_list(catalogue),  # type: ignore[misc]
                lambda: LIST_MS,
                unit="ms",
                within=LISTS,
            )


def _rebuild(catalogue: Catalogue, artefacts: Artefacts) -> None:
    outcome = catalogue.rebuild(artefacts)
    assert (outcome.images, len(outcome.differences)) == (IMAGES, IMAGES)


def _slowest_list(catalogue: Catalogue) -> float:
    """Return the 99th percentile of the milliseconds of a page, the first or the next, as the agent answers with it.

    The agent freezes what it has loaded, and so does this process: it is no garbage that a list would have to examine.
    """
    for _ in islice(_pages(catalogue), len(FILTERS)):
        pass  # caches fill
    gc.collect()
    gc.freeze()
    try:
        return 1000 * statistics.quantiles(islice(_pages(catalogue), LISTS), n=100)[98]
    finally:
        gc.unfreeze()


def _pages(catalogue: Catalogue) -> Iterator[float]:
    """Yield how many seconds each page took, of two with each filter in turn."""
    for wanted in cycle(FILTERS):
        token = ""
        for _ in range(2):
            begin = time.perf_counter()
            page = catalogue.list(wanted, token=token)
            list_message(page).SerializeToString()
            yield time.perf_counter() - begin
            if not (token := page.token):
                break


def _artefacts(directory: Path) -> Artefacts:
    """Write the images, with labels next to them."""
    (directory / "images").mkdir(mode=0o700)
    config = replace(Config(), checkpoint_root=directory / "images", key_directory=directory / "keys")
    key = signing_key(config)
    for number in range(IMAGES):
        namespace = f"team-{number % NAMESPACES}"
        place = directory / "images" / namespace / f"image-{number}"
        time = (EPOCH + timedelta(days=20_000, seconds=number)).isoformat(timespec="milliseconds")
        id = f"{number:08x}-0000-4000-8000-{number:012x}"
        write_image(place, key, id=id, time=time, namespace=namespace, pod=f"web-{number % 7}", name="app")
        labels = {"stage": ("warm", "cold")[number % 2], "number": str(number % 100)}
        kept = Annotations(1, labels, pinned=number % 10 == 0, generation=number)
        write_private(place / REGISTRY, encode(Beside(id, kept)))
    return Artefacts(config)
