"""`kybernate proxy` as a program: settings, the agent, signals, until SIGTERM."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from pathlib import Path

import uvloop

from kybernate.client.asynchronous import AsyncAgent
from kybernate.client.target import Tls
from kybernate.proxy import service, settings
from kybernate.proxy.agent_models import AgentModels
from kybernate.proxy.document import ProxySettingsInvalid
from kybernate.proxy.settings import Agent, Settings
from kybernate_shim.logs import LineWriter, Log, number_of


def run(path: Path, level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT. Raises ProxySettingsInvalid."""
    found = settings.load(path)
    if found.plane == "haproxy":
        raise ProxySettingsInvalid(f"{path}: plane: haproxy is not in this version yet")
    _raise_descriptors()
    log = Log(LineWriter(sys.stderr.fileno()).write, number_of(level), {})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(found, log))


async def _serve(found: Settings, log: Log) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncAgent(found.agent.address, tls=_tls(found.agent)) as agent:
        running = await service.start(found, AgentModels(agent, found.models), log)
        log.info("proxy.started", port=running.port, models=len(found.models), plane=found.plane)
        await stopped.wait()
        await running.close()
    log.info("proxy.stopped")


def _tls(agent: Agent) -> Tls | None:
    if agent.ca is None or agent.certificate is None or agent.key is None:
        return None
    return Tls(agent.ca, agent.certificate, agent.key, agent.server_name)


def _raise_descriptors() -> None:
    """Allow as many descriptors as the system lets this process have: each held request is one, two once passed on."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
