"""`kybernate up` as a program: a keeper of models behind the proxy, and a socket for what people ask of it.

What runs outlives the program: started again, it takes over what there is. All that it knows beyond the file is in the
labels of pods and the names of templates.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import ClientSession

from kybernate.client import Agent
from kybernate.client.asynchronous import AsyncAgent
from kybernate.node.failure import Failure, Invalid
from kybernate.proxy import service
from kybernate.proxy.settings import Model, Route
from kybernate.proxy.settings import Settings as ProxySettings
from kybernate.up import control, network
from kybernate.up.keeper import Keeper
from kybernate.up.models_file import ModelsFile, load
from kybernate.up.pods import Pods, Running
from kybernate.up.room import Room
from kybernate.up.seats import Seats
from kybernate.up.source import KeptModels, gpus_of
from kybernate.up.steps import TEMPLATE_LABEL
from kybernate_shim.logs import Log

REMOVALS: Final = 8  # at one time: a program may take ten seconds to end
WATCH_SECONDS: Final = 0.5  # between two looks at the file
Say = Callable[[str, str], None]  # a model's name, and a sentence about it


def proxy_settings(file: ModelsFile) -> ProxySettings:
    """Return the settings of the proxy in front of a file's models."""
    models = tuple(
        Model(
            name=entry.name,
            upstream=f"http://127.0.0.1:{entry.port}",
            container=f"{file.project}/{entry.name}",
            aliases=entry.aliases,
            upstream_model=entry.upstream_model,
            concurrency=entry.concurrency,
            idle=entry.idle,
            filters=entry.filters,
        )
        for entry in file.models
    )
    return ProxySettings(
        listen=file.listen,
        models=models,
        selectors=file.selectors,
        peers=file.peers,
        routes=(Route(keys=file.keys),),
    )


@dataclass
class Program:
    """`kybernate up` at work on a file."""

    path: Path
    environment: Mapping[str, str]
    file: ModelsFile
    say: Say
    log: Log
    stopped: asyncio.Event
    changed: asyncio.Event
    listens: asyncio.Event = field(default_factory=asyncio.Event)  # the proxy does, so that verbs can be carried out

    async def run(self, agent_address: str, *, watch: bool) -> None:
        """Keep the models until SIGTERM or SIGINT."""
        with Pods(self.file.project) as pods:
            self.pods = pods
            async with AsyncAgent(agent_address) as agent, ClientSession() as session:
                await agent.node()
                async with Seats(agent) as seats:
                    room = Room(lambda: gpus_of(agent), list, lambda name: None, lambda: seats.there)
                    keeper = Keeper(self.file, pods, agent, session, self.say, room)
                    async with control.serving(self.file.project, self._verbs(keeper)), self._watching(watch):
                        while not self.stopped.is_set():
                            await self._serve(agent, keeper, seats)

    async def _serve(self, agent: AsyncAgent, keeper: Keeper, seats: Seats) -> None:
        """Serve the file as it is now, until it has changed or the program is to end."""
        self.changed.clear()
        settings = proxy_settings(self.file)
        if any(entry.network == "pod" for entry in self.file.models):
            await asyncio.to_thread(network.ensure, self.file.project, self.pods, self.say)
        if (seated := [entry.name for entry in self.file.models if entry.seat]) and not seats.there:
            self.say("", f"the agent has no seats: room for {', '.join(seated)} is decided here, by sizes")
        self._source = source = KeptModels(agent, keeper, settings.models)
        keeper.room.holders, keeper.room.leave = source.holders, source.leave
        running = await service.start(settings, source, self.log)
        self.listens.set()
        source.engine, source.seat_is_crowded = running.engine, seats.crowded
        running.engine.crowded, running.engine.upstream_of = source.crowded, source.upstream_of
        keeper.room.matrix = self.file.matrix
        self.say("", f"http://{self.file.listen[0]}:{running.port} answers for {len(self.file.models)} models")
        keeper.idle = source.idle
        keeping = asyncio.create_task(keeper.run())
        windows = asyncio.create_task(source.keep_windows())
        waiting = [asyncio.create_task(one.wait()) for one in (self.stopped, self.changed)]
        try:
            await asyncio.wait([keeping, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()  # raises what ended it
        finally:
            for task in (*waiting, keeping, windows):
                task.cancel()
            await asyncio.gather(keeping, windows, return_exceptions=True)
            await running.close()
        if self.changed.is_set() and not self.stopped.is_set():
            self.file = _reread(self.path, self.environment, self.file, self.say)
            keeper.change(self.file)

    def _verbs(self, keeper: Keeper) -> Mapping[str, control.Do]:
        def model_in(asked: Mapping[str, Any]) -> str:
            if not isinstance(name := asked.get("model"), str):
                raise Invalid("the request names no model")
            return keeper.kept(name).entry.name

        def proxied(name: str) -> Model:
            return next(one for one in proxy_settings(self.file).models if one.name == name)

        async def models(asked: Mapping[str, Any]) -> Any:
            return self._source.listed()

        async def wake(asked: Mapping[str, Any]) -> Any:
            name = model_in(asked)
            await self._source.wake(proxied(name))
            return name

        async def sleep(asked: Mapping[str, Any]) -> Any:
            name = model_in(asked)
            if asked.get("disk"):
                await keeper.park(name)
            elif keeper.models[name].done.settled:
                await self._source.put_to_sleep(name)
            return name

        async def restart(asked: Mapping[str, Any]) -> Any:
            name = model_in(asked)
            await keeper.restart(name, fresh=bool(asked.get("fresh")))
            return name

        def once_it_listens(do: control.Do) -> control.Do:
            async def work(asked: Mapping[str, Any]) -> Any:
                await self.listens.wait()
                return await do(asked)

            return work

        verbs = {"models": models, "wake": wake, "sleep": sleep, "restart": restart}
        return {name: once_it_listens(do) for name, do in verbs.items()}

    @asynccontextmanager
    async def _watching(self, watch: bool) -> AsyncIterator[None]:
        """Follow the file while the block runs, where that is wanted."""
        task = asyncio.create_task(self._watch()) if watch else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _watch(self) -> None:
        """Read the file again whenever it, or one of its files of variables, is another one.

        By its time and size, as editors replace files in many ways, and files may lie on a network's file system.
        """
        before = self._marks()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (now := self._marks()) != before:
                before = now
                self.changed.set()

    def _marks(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in (self.path, *self.file.variables):
            try:
                status = path.stat()
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                found.append(None)
        return tuple(found)


async def keep(
    path: Path, environment: Mapping[str, str], agent_address: str, say: Say, log: Log, *, watch: bool = False
) -> None:
    """Keep the models of a file until SIGTERM or SIGINT; SIGHUP, or `watch`, reads it again. What runs stays.

    Raises Invalid, Refused and AgentUnreachable.
    """
    file = load(path, environment)
    stopped, changed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, changed.set)
    with control.only_one(file.project):
        await Program(path, environment, file, say, log, stopped, changed).run(agent_address, watch=watch)


def _reread(path: Path, environment: Mapping[str, str], file: ModelsFile, say: Say) -> ModelsFile:
    """Return the changed file; the former one, where it cannot be used."""
    try:
        found = load(path, environment)
    except Failure as failure:
        say("", f"the file is not used as it is now: {failure}")
        return file
    if found == file:
        return file
    if found.project != file.project:
        say("", f"project cannot be changed while its models run: it stays {file.project}")
        return file
    return found


def down(project: str, say: Say) -> None:
    """Remove the containers of a project. Raises Failure, and Refused while `kybernate up` keeps them."""
    with control.only_one(project), Pods(project) as pods, ThreadPoolExecutor(REMOVALS) as pool:

        def remove(running: Running) -> None:
            pods.remove(running)
            say(running.model, "removed")

        for done in [pool.submit(remove, running) for running in pods.list().values()]:
            done.result()
        network.remove(project, say)


def remove_templates(project: str, agent_address: str, say: Say) -> None:
    """Remove the templates of a project; where the agent does not answer, they stay, which is said."""
    try:
        with Agent(agent_address) as agent:
            for image in [one for one in agent.images(namespace=project) if one.labels.get(TEMPLATE_LABEL) == project]:
                agent.delete_image(f"{project}/{image.name}", force=True).result()
                say("", f"removed the template {image.name}")
    except Failure as failure:
        say("", f"templates stay: {failure}")
