"""Every setting that the manual's table says to be in effect immediately: the next call goes by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.checkpoint.gpu.accelerator import CudaAccelerator
from kybernate_shim.config import LIVE, Config
from kybernate_shim.config.documenting import documented
from kybernate_shim.cuda_helper.holders import Holders
from kybernate_shim.cuda_helper.service import CudaService, NodeSettings
from kybernate_shim.cuda_helper.workers import Lifetime, Workers
from kybernate_shim.gpu.sequence import StepSeconds
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.options import RuntimeOptions, effective_config
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.task.container import Container
from kybernate_shim.task.service import TaskService
from tests.unit.task.runtime import Life

# Another value than the default, for each key.
OTHER: dict[str, str] = {
    "runtime": '"crun"',
    "runtime_root": '"/other"',
    "systemd_cgroup": "true",
    "criu": '"/other/criu"',
    "criu_libdir": '"/other"',
    "checkpoint_root": '"/other"',
    "memory_root": '"/other"',
    "trusted_roots": '["/other"]',
    "restore_from_env": "true",
    "hook_mounts": '["/other"]',
    "key_directory": '"/other"',
    "shared_key": '"/other"',
    "parking_root": '"/other"',
    "work_root": '"/other"',
    "log_file": '"/other"',
    "audit_log": '"/other"',
    "log_level": '"error"',
    "verify": "false",
    "annotations": "[]",
    "volumes_limit": '"64MiB"',
    "dump_memory": '"64MiB"',
    "max_freeze": "7",
    "encryption_key": '"/other"',
    "runtime_in_memory": "false",
    "fork_server_idle": "7",
    "fork_server_tuning": "false",
    **{row.key: "7" for row in documented() if row.key.startswith("deadlines.")},
    **{f"gpu.{step}": "7" for step in ("lock", "checkpoint", "restore", "unlock", "helper_idle", "threads")},
    "gpu.data_path": '"plain"',
    "gpu.huge_pages": '"off"',
    "gpu.arena": '"64MiB"',
    "gpu.arena_containers": '"all"',
    "gpu.arena_share": "0.5",
    "gpu.image_pool": '"/other"',
    "gpu.image_pool_files": '["2MiB"]',
    "gpu.visible_devices_env": "true",
    "gpu.denied_drivers": '["580.*"]',
}
OF_DAEMONS = [row.key for row in documented() if row.since == LIVE]
KEPT = [row.key for row in documented() if row.since != LIVE]
OF_THE_HELPER = ["gpu.arena", "gpu.arena_share", "gpu.helper_idle", "gpu.image_pool", "gpu.image_pool_files"]


def write(file: Path, key: str) -> None:
    """Put a file in place that has only this key, with another value than the default."""
    table, _, name = key.rpartition(".")
    new = file.with_suffix(".new")
    new.write_text(f"{f'[{table}]' if table else ''}\n{name} = {OTHER[key]}\n")
    new.rename(file)


def value(config: Any, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config


class Daemon:
    """A daemon with one container, which has had an operation on GPUs already; `file` is the node's."""

    def __init__(self, directory: Path, options: RuntimeOptions | None = None) -> None:
        self.file = directory / "shim.toml"
        life = Life(directory)
        self.container: Container = life.container
        self.container.runtime = Runtime(Cli(Path("/bin/runc"), directory, None), life.children, {}, Config().deadlines)
        if options is not None:
            self.container.options = options
            self.container.config = effective_config(Config(), options)
        self.gpus: CudaAccelerator = self.container.operations()._accelerator()
        self.service = TaskService("ns", life.children, lambda *_: None, structlog.get_logger(), cast(Any, None))
        self.service.settings = LiveConfig(structlog.get_logger(), self.file)
        self.service.containers["c1"] = self.container

    async def call(self) -> None:
        await self.service.state(wire.StateRequest(id="c1"))


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


def test_every_setting_is_tried() -> None:
    assert OTHER.keys() == {row.key for row in documented()}


@pytest.mark.parametrize("key", OF_DAEMONS)
def test_next_call_goes_by_the_changed_file(daemon: Daemon, key: str) -> None:
    async def story() -> None:
        await daemon.call()
        before = value(daemon.container.config, key)
        assert before == value(Config(), key)
        write(daemon.file, key)
        await daemon.call()
        container, gpus = daemon.container, daemon.gpus
        assert value(container.config, key) == value(Config.load(daemon.file), key) != before
        assert container.runtime.deadlines == container.config.deadlines
        settings = container.config.gpu
        assert gpus._gpus.settings == settings
        assert gpus._gpus.limits == StepSeconds(settings.lock, settings.checkpoint, settings.restore, settings.unlock)
        daemon.file.unlink()
        await daemon.call()
        assert value(container.config, key) == before

    asyncio.run(story())


@pytest.mark.parametrize("key", KEPT)
def test_container_keeps_what_it_was_made_with(daemon: Daemon, key: str) -> None:
    async def story() -> None:
        write(daemon.file, key)
        await daemon.call()
        assert value(daemon.container.config, key) == value(Config(), key) != value(Config.load(daemon.file), key)

    asyncio.run(story())


def test_operation_that_runs_keeps_what_it_began_with(daemon: Daemon) -> None:
    async def story() -> None:
        async with daemon.container.lock:
            write(daemon.file, "gpu.lock")
            await daemon.call()
            assert daemon.gpus._gpus.limits.lock == Config().gpu.lock
        await daemon.call()
        assert daemon.gpus._gpus.limits.lock == 7

    asyncio.run(story())


def test_containers_own_options_win_over_a_change(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, RuntimeOptions(config_body="verify = true\n[gpu]\nlock = 3\n"))

    async def story() -> None:
        for key in ("verify", "gpu.lock"):
            write(daemon.file, key)
            await daemon.call()
            assert (daemon.container.config.verify, daemon.container.config.gpu.lock) == (True, 3)

    asyncio.run(story())


@pytest.mark.parametrize("key", OF_THE_HELPER)
def test_helpers_next_call_goes_by_the_changed_file(tmp_path: Path, key: str) -> None:
    file = tmp_path / "shim.toml"

    async def story() -> None:
        log = structlog.get_logger()
        workers, holders = Workers(Lifetime(tmp_path / "lifetime")), Holders(tmp_path / "holders", [])
        helper = CudaService(workers, holders, NodeSettings(LiveConfig(log, file), {}), tmp_path / "arena", log)
        before = await helper.look()
        write(file, key)
        after = await helper.look()
        name = key.removeprefix("gpu.")
        assert getattr(after, name) == value(Config.load(file), key) != getattr(before, name)
        assert helper.arena_manager.arena.in_use == (after.arena, after.arena_share)

    asyncio.run(story())
