"""Root filesystems that are not everyday ones: more layers than the options of one mount(2) can name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.ctr import Ctr
from tests.system.images import imported, layer

LAYERS = 80
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def many_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with a shell and 80 further layers of one file each."""
    shell = layer({"bin/sh": Path("/bin/busybox").read_bytes()})
    files = [layer({f"layer{number}": b"%d\n" % number}) for number in range(LAYERS)]
    with imported("layers", [shell, *files], tmp_path_factory.mktemp("image")) as reference:
        yield reference


@pytest.mark.as_root("it writes to the root directory of an image that has no other")
def test_more_layers_than_fit_a_page_are_mounted(ctr: Ctr, many_layers: str) -> None:
    ctr.image = many_layers
    script = (
        "for n in /layer*; do read number < $n; echo $number; done; echo written > /new; read back < /new; echo $back"
    )
    with ctr.running("/bin/sh", "-c", "while :; do sleep 1; done") as id:
        options = _mount_options(ctr, id)
        assert len(options) > PAGE, f"{len(options)} bytes of options fit a page"
        *numbers, written = ctr.exec(id, "/bin/sh", "-c", script).split()
        assert sorted(map(int, numbers)) == list(range(LAYERS))
        assert written == "written"


def _mount_options(ctr: Ctr, id: str) -> str:
    """Return the options that containerd gives for the container's rootfs."""
    snapshot = json.loads(ctr("container", "info", id))["SnapshotKey"]
    return ctr("snapshots", "mounts", "/anywhere", snapshot)
