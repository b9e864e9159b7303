"""Containers with VRAM come back from S3 while their images arrive: in which order, and what failures leave."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kybernate_shim.checkpoint.image.manifest import ARRIVING
from kybernate_shim.checkpoint.image.store import read_image
from tests.contract.store.servers import BUCKET
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import PYTHON, Witness, counting, kybernate, refused
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arriving import (
    IMAGES,
    MEMORY,
    MIB,
    Store,
    assert_nothing_is_left,
    command,
    held_up,
    programs,
    put,
    restored,
    waiting,
)


def test_criu_begins_before_the_last_chunk_comes(ctr: Ctr, gpus: Gpus, store: Store, name: str, tmp_path: Path) -> None:
    log, id = tmp_path / "log", ctr.new_id("gpu")
    put(ctr, name, log)
    with restored(ctr, id, log) as container:
        with held_up(store, name, id, log) as restore:
            store.slowed.release()
            out, err = restore.communicate(timeout=60)
            assert restore.returncode == 0, err
            answer = json.loads(out)
        container.computes_on()
        assert not MEMORY.exists(), "the image is still in memory"
    assert not (IMAGES / name).exists()
    assert answer["source"] == f"object s3://{BUCKET}/node"
    steps = {step["name"]: step for step in answer["steps"]}
    assert steps["arrival"]["seconds"] > 0
    assert steps["arrival"]["bytes"] >= MIB << 20
    assert {"restore", "vram-load", "cuda-restore"} <= steps.keys()


def test_killed_sender_ends_the_restore(ctr: Ctr, gpus: Gpus, store: Store, name: str, tmp_path: Path) -> None:
    log, id = tmp_path / "log", ctr.new_id("gpu")
    put(ctr, name, log)
    before = log.read_text()
    with restored(ctr, id, log), held_up(store, name, id, log) as restore:
        restore.kill()
        restore.wait()
        eventually(lambda: not waiting(id), seconds=20)
        eventually(lambda: gpus.used() == [0, 0])
        eventually(lambda: not programs())
        assert log.read_text() == before


def test_flipped_bit_is_found_before_the_process_runs(
    ctr: Ctr, gpus: Gpus, store: Store, name: str, tmp_path: Path
) -> None:
    log, id = tmp_path / "log", ctr.new_id("gpu")
    put(ctr, name, log)
    before = log.read_text()
    store.flip_a_bit_of(store.last_pack())
    said = refused(*command(name, id, log))
    assert "is damaged in all packs" in said, said
    assert_nothing_is_left(gpus, id, log, before)


def test_encrypted_image_is_decrypted_as_it_arrives(
    ctr: Ctr, gpus: Gpus, store: Store, name: str, shim_config: Path, tmp_path: Path
) -> None:
    log, id, key = tmp_path / "log", ctr.new_id("gpu"), tmp_path / "image.key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    shim_config.write_text(f'encryption_key = "{key}"\n')
    put(ctr, name, log)
    with restored(ctr, id, log) as container:
        with held_up(store, name, id, log) as restore:
            store.slowed.release()
            assert restore.wait(60) == 0, restore.stderr
        container.computes_on()
        assert not MEMORY.exists()
        assert not Path("/run/kybernate/plain").exists()


def test_image_without_vram_arrives_whole(ctr: Ctr, store: Store, name: str, tmp_path: Path) -> None:
    log, id = tmp_path / "log", ctr.new_id()
    with counting(ctr, log=log) as witness:
        kybernate("checkpoint", witness.id, name, "--exit")
        log.rename(tmp_path / "kept")
    kybernate("store", "put", name)
    shutil.rmtree(IMAGES / name)
    try:
        assert json.loads(kybernate(*command(name, id, log)[1:]))["source"] == f"object s3://{BUCKET}/node"
        Witness(id, log).assert_goes_on()
    finally:
        Ctr(ctr.runtime, ctr.namespace).remove(id)


def test_image_is_restored_by_its_name_while_it_arrives(
    ctr: Ctr, gpus: Gpus, store: Store, name: str, tmp_path: Path
) -> None:
    """By the annotation, as pods are; it stays on the node, and is no image for anything else before it is whole."""
    log, place = tmp_path / "log", IMAGES / name
    put(ctr, name, log)
    store.slowed.hold(store.last_pack())
    get = ["kybernate", "store", "get", name, "--while-restoring"]
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(get, stdout=subprocess.DEVNULL) as getting:
        eventually(lambda: (place / ARRIVING).exists(), seconds=60)
        for verb in (["inspect", str(place), "--verify"], ["registry", "show", name], ["store", "put", str(place)]):
            assert refused("kybernate", *verb)
        assert "unfinished" in kybernate("images", "--all")
        began = ctr.new_id("gpu")
        flags = ["--log-uri", f"file://{log}", "--annotation", f"kybernate.io/restore-from={place}"]
        own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
        launched = pool.submit(own.launch, "false", id=began, flags=[*flags, *gpu.mounts(), *gpu.visible(0)])
        with restored(ctr, began, log) as container:
            eventually(lambda: waiting(began), seconds=60)
            store.slowed.release()
            launched.result(60)
            container.computes_on()
        assert getting.wait(60) == 0
    assert read_image(place).manifest.vram
    assert not (place / ARRIVING).exists()
    assert "verified" in kybernate("inspect", str(place), "--verify")
