"""`kybernate proxy` as a program: settings, the agent, signals, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from kybernate.agent.notify import Notifier, forget
from kybernate.client.asynchronous import AsyncAgent
from kybernate.client.contexts import Tls
from kybernate.node.failure import Failure
from kybernate.proxy import service, settings
from kybernate.proxy.agent_models import AgentModels
from kybernate.proxy.service import Service
from kybernate.proxy.settings import Agent, Settings
from kybernate_shim.logs import LineWriter, Log, number_of


def run(path: Path, level: str = "info", *, ext_proc: str = "") -> None:
    """Serve until SIGTERM or SIGINT; SIGUSR1 leaves HAProxy to the next proxy.

    SIGHUP has it read the settings again, and open the access log again. `ext_proc` is where Envoy asks, in place of
    what the settings say. Raises as `service.start`.
    """

    def load() -> Settings:
        found = settings.load(path)
        return replace(found, ext_proc=ext_proc) if ext_proc else found

    found = load()
    _raise_descriptors()
    log = Log(LineWriter(sys.stderr.fileno()).write, number_of(level), {})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(found, load, log))


async def _serve(found: Settings, load: Callable[[], Settings], log: Log) -> None:
    notifier = Notifier.of(os.environ, os.getpid())
    forget(os.environ)
    ended: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.put_nowait, number)
    async with AsyncAgent(found.agent.address, tls=_tls(found.agent)) as agent:
        models = AgentModels(agent, found.models)
        running = await service.start(found, models, log, (models, models.name))
        log.info("proxy.started", port=running.port, models=len(found.models), plane=found.plane)
        spare_collector()
        notifier.send(READY="1", STATUS=f"serving on port {running.port}")
        while (received := await ended.get()) == signal.SIGHUP:
            running.reopen_log()
            await _read_again(running, load, log)
        notifier.send(STOPPING="1")
        await running.close(leave=received == signal.SIGUSR1)
    log.info("proxy.stopped")


async def _read_again(running: Service, load: Callable[[], Settings], log: Log) -> None:
    try:
        await running.change(load())
    except Failure as error:
        log.error("proxy.settings_not_changed", error=str(error), advice=error.advice)
    else:
        log.info("proxy.settings_changed")


def spare_collector() -> None:
    """Leave what is loaded by now out of full collections, each of which would stop all requests for some 60 ms."""
    gc.collect()
    gc.freeze()


def _tls(agent: Agent) -> Tls | None:
    if agent.ca is None or agent.certificate is None or agent.key is None:
        return None
    return Tls(agent.ca, agent.certificate, agent.key, agent.server_name)


def _raise_descriptors() -> None:
    """Allow as many descriptors as the system lets this process have: each held request is one, two once passed on."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
