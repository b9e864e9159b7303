"""The proxy's parts put together: engine, data plane, TCP ports and the administrator's port, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import ClientSession, web

from kybernate.node.failure import Failure
from kybernate.proxy.activity import Activity
from kybernate.proxy.document import unusable
from kybernate.proxy.embedded.connection import Connections
from kybernate.proxy.embedded.handler import Handler
from kybernate.proxy.embedded.tcp import TcpPort
from kybernate.proxy.embedded.upstream import Inner, session
from kybernate.proxy.engine import Engine
from kybernate.proxy.metrics import AccessLog, Metrics, States
from kybernate.proxy.models import Models
from kybernate.proxy.record import Record
from kybernate.proxy.rules import Rules
from kybernate.proxy.settings import Model, Selector, Settings
from kybernate.proxy.shares import Shares, Sharing
from kybernate_shim.logs import Log

if TYPE_CHECKING:
    from kybernate.proxy.ext_proc.server import ExtProcPort
    from kybernate.proxy.haproxy.plane import HaproxyPlane

BACKLOG = 4096


@dataclass
class Observers:
    """Passes each request that has ended to metrics and access log."""

    metrics: Metrics
    access: AccessLog | None

    def ended(self, record: Record) -> None:
        self.metrics.ended(record)
        if self.access is not None:
            self.access.ended(record)


@dataclass
class Service:
    """A running proxy. `port`, `admin_port` and `tcp_ports` are those that it listens on."""

    engine: Engine
    metrics: Metrics
    client: ClientSession
    connections: Connections
    rules: Rules
    servers: list[asyncio.Server] = field(default_factory=list)
    runners: list[web.ServerRunner] = field(default_factory=list)
    tcp: list[TcpPort] = field(default_factory=list)
    tcp_ports: list[int] = field(default_factory=list)
    port: int = 0
    admin_port: int = 0
    ext_proc: ExtProcPort | None = None
    ext_proc_port: int = 0
    plane: HaproxyPlane | None = None
    inner: Inner | None = None
    watching: list[asyncio.Task[None]] = field(default_factory=list)
    access: AccessLog | None = None
    log: Log | None = None

    def reopen_log(self) -> None:
        """Write the access log to a new file of its name, where the old one was renamed."""
        if self.access is None or self.log is None:
            return
        try:
            self.access.reopen()
        except OSError as error:
            self.log.error("proxy.access_log_not_opened", error=str(error))

    async def change(self, settings: Settings) -> None:
        """Decide requests by other settings from now on; those that are answered or wait stay as they are.

        Raises Invalid and HaproxyUnusable; then nothing has changed.
        """
        before = self.rules.settings
        self.rules.change(settings)
        if self.plane is not None:
            try:
                await self.plane.change(settings)
            except Failure:  # HaproxyUnusable
                self.rules.change(before)
                raise

    async def close(self, *, drain: float = 5.0, leave: bool = False) -> None:
        """Accept no more, refuse those that are held, give those that are answered some seconds, and end.

        HAProxy ends once its streams have; with `leave`, it serves until the next proxy takes it over.
        """
        if self.plane is not None and self.plane.started:
            if leave:
                self.plane.child.leave()
            else:
                self.plane.child.stop()
        for server in self.servers:
            server.close()
        for port in self.tcp:
            await port.close()
        for task in self.watching:
            task.cancel()
        await self.engine.close()
        if self.ext_proc is not None:
            await self.ext_proc.close(drain)
        await self.connections.shutdown(drain)
        for runner in self.runners:
            await runner.cleanup()
        await self.client.close()
        if self.inner is not None:
            await self.inner.client.close()


async def start(settings: Settings, source: Models, log: Log, sharing: tuple[Sharing, str] | None = None) -> Service:
    """Start a proxy: it listens when this returns, by HAProxy where the settings say so.

    `sharing` is who divides the concurrency of models among proxies, and this one's name there.

    Raises Invalid where a file of keys or an address cannot be used, and HaproxyUnusable.
    """
    plane: HaproxyPlane | None = None
    if settings.plane == "haproxy":
        from kybernate.proxy.haproxy.plane import HaproxyPlane  # most proxies have none, and start sooner without

        plane = HaproxyPlane(settings, log)
    metrics = Metrics(one.name for one in settings.models)
    engine = Engine(source, settings.models, metrics, log, plane)
    metrics.registry.register(States(engine))
    client = session()
    access = AccessLog(settings.access_log) if settings.access_log else None
    rules = Rules(settings)
    inner = Inner(session(plane.places.inner), plane.inner_names()) if plane is not None else None
    observers = Observers(metrics, access)
    handler = Handler(rules, engine, client, observers, log, inner)
    connections = Connections(handler, settings.limits, handler.trusted, lambda error: _log_defect(log, error))
    service = Service(engine, metrics, client, connections, rules, plane=plane, inner=inner, access=access, log=log)
    if settings.ext_proc:
        from kybernate.proxy.ext_proc.server import ExtProcPort  # its messages take a while to load

        service.ext_proc = ExtProcPort(rules, engine, observers)
    try:
        await _listen(service, settings, log)
        if plane is not None:
            await plane.start()
            service.watching.append(asyncio.create_task(plane.watch(engine)))
    except BaseException:
        await service.close()
        raise
    service.watching.append(asyncio.create_task(engine.run()))
    service.watching.append(asyncio.create_task(Activity(engine, source, log).run()))
    if sharing is not None:
        service.watching.append(asyncio.create_task(Shares(engine, *sharing, log).run()))
    return service


async def _listen(service: Service, settings: Settings, log: Log) -> None:
    loop = asyncio.get_running_loop()
    try:
        if service.plane is not None:
            socket = service.plane.prepare()
            service.servers.append(await loop.create_unix_server(service.connections, socket, backlog=BACKLOG))
            service.port = settings.listen[1]
        else:
            server = await loop.create_server(service.connections, *settings.listen, backlog=BACKLOG)
            service.servers.append(server)
            service.port = int(server.sockets[0].getsockname()[1])
        for route in settings.tcp:
            model = _model_of(settings, route.to)
            port = TcpPort(route, model, service.engine, settings.limits, service.connections.trusted, log)
            service.tcp.append(port)
            service.tcp_ports.append(await port.start())
        if service.ext_proc is not None:
            service.ext_proc_port = await service.ext_proc.start(settings.ext_proc)
        if settings.admin is not None:
            service.admin_port = await _administer(service, settings.admin)
    except OSError as error:
        raise unusable(f"an address cannot be listened on: {error}") from error


def _model_of(settings: Settings, name: str) -> Model:
    """Return the model of a TCP route, which has no request that could choose among several."""
    selectors: Mapping[str, Selector] = {one.name: one for one in settings.selectors}
    wanted = selectors[name].of[0] if name in selectors else name
    found = next((one for one in settings.models if wanted in (one.name, *one.aliases)), None)
    if found is None:
        raise unusable(f"tcp: to: {name} is no model of this proxy")
    return found


async def _administer(service: Service, listen: tuple[str, int]) -> int:
    """Serve metrics, health and states to the administrator, and take requests to suspend."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        path = request._message.path.partition("?")[0]
        if path == "/metrics":
            return web.Response(body=service.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})
        if path == "/health":
            ready = service.engine.seen.is_set() or all(
                not held.model.container for held in service.engine.held.values()
            )
            return web.Response(status=200 if ready else 503, text="ok\n" if ready else "no word of the agent yet\n")
        if path == "/state":
            return web.Response(text=json.dumps(_state(service), indent=1), content_type="application/json")
        words = path.strip("/").split("/")
        if request._message.method == "POST" and words[0] == "suspend" and words[-1] in service.engine.held:
            service.engine.want_suspended(words[-1])
            return web.Response(status=202, text="suspended once nothing is in flight\n")
        return web.Response(status=404, text="/metrics, /health, /state, and POST /suspend/MODEL\n")

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    service.runners.append(runner)
    await web.TCPSite(runner, *listen).start()
    return int(runner.addresses[0][1])


def _state(service: Service) -> dict[str, object]:
    return {
        name: {
            "state": held.phase,
            "waiting": len(held.waiting),
            "in_flight": held.in_flight + held.elsewhere,
            "failure": held.failure,
        }
        for name, held in service.engine.held.items()
    }


def _log_defect(log: Log, error: BaseException | None) -> None:
    log.error("proxy.request_failed", error=str(error), exc_info=error)
