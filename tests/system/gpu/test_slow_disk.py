"""An image of a container with GPU state that a slow disk takes: VRAM before the freeze, CRIU's files after it."""

from __future__ import annotations

import json
from pathlib import Path

from kybernate_shim.checkpoint.image.store import read_image
from tests.fakes.cuda import Gpus
from tests.fakes.slow_filesystem import slow_filesystem
from tests.system import gpu
from tests.system.checkpoints import assert_whole, kybernate
from tests.system.ctr import Ctr


def test_vram_and_memory_come_to_one_image_and_back(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    disk, backing, log = tmp_path / "disk", tmp_path / "backing", tmp_path / "log"
    disk.mkdir()
    backing.mkdir(mode=0o700)
    with slow_filesystem(disk, backing, 8 << 20) as filesystem:
        image = disk / "image"
        with gpu.computing(ctr, log=log) as container:
            made = json.loads(kybernate("checkpoint", container.id, str(image), "--json"))
            assert "write" in [step["name"] for step in made["steps"]]
            container.computes_on()
        manifest = assert_whole(image)
        assert manifest.frozen_ms == made["frozen_ms"] > 0
        assert {file.file for file in manifest.vram} <= {file.name for file in read_image(image).manifest.files}
        filesystem.rate = float("inf")
        with gpu.computing_again(ctr, image, tmp_path / "again") as again:
            again.computes_on()
