"""`kybernate up` as a program: models brought up one after the other, kept running, behind the proxy.

What runs outlives the program: started again, it takes over what there is. All that it knows beyond the file is in the
labels of pods and the names of templates.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from kybernate.client import AgentRefused
from kybernate.client.asynchronous import AsyncAgent
from kybernate.node.failure import Failure, Refused, Unavailable
from kybernate.proxy import service
from kybernate.proxy.agent_models import AgentModels
from kybernate.proxy.settings import Model
from kybernate.proxy.settings import Settings as ProxySettings
from kybernate.up.lifecycle import Done, Seen, Step, decide, failures_after
from kybernate.up.models_file import Entry, ModelsFile, load
from kybernate.up.pods import Pods, Running
from kybernate_shim.logs import Log

LOCKS: Final = Path("/run/kybernate/up")
POLL_SECONDS: Final = 1.0  # between two looks at what runs
HEALTH_SECONDS: Final = 0.25  # between two questions to a program that loads
WARM_UP_SECONDS: Final = 600.0
TEMPLATE_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 5.0  # after containerd or the agent refused a step
Say = Callable[[str, str], None]  # a model's name, and a sentence about it


@dataclass
class Kept:
    """A model, and what was done for it."""

    entry: Entry
    done: Done = field(default_factory=Done)
    step: Step = Step.NONE
    problem: str = ""
    ended: float = 0.0


class Keeper:
    """Keeps the models of a file as it says. One step at a time, so that models load one after the other."""

    def __init__(self, file: ModelsFile, pods: Pods, agent: AsyncAgent, session: ClientSession, say: Say) -> None:
        self._pods, self._agent, self._session, self._say = pods, agent, session, say
        self._project = file.project
        self.models = {entry.name: Kept(entry) for entry in file.models}

    def change(self, file: ModelsFile) -> None:
        """Keep another file's models; those that are as before are not touched."""
        before = self.models
        self.models = {}
        for entry in file.models:
            kept = before.get(entry.name)
            same = kept is not None and kept.entry.digest == entry.digest
            self.models[entry.name] = replace(kept, entry=entry) if kept is not None and same else Kept(entry)

    async def run(self) -> None:
        """Keep the models, without an end."""
        while True:
            await self.turn()
            await asyncio.sleep(POLL_SECONDS)

    async def turn(self) -> None:
        """Look at all models once, and do what each needs until it is ready or has to wait."""
        running: Mapping[str, Running] = await asyncio.to_thread(self._pods.list)
        for name in running.keys() - self.models.keys():
            self._say(name, "is no longer in the file: its container is removed")
            await asyncio.to_thread(self._pods.remove, running[name])
        for kept in sorted(self.models.values(), key=lambda one: -one.entry.priority):
            running = await self._keep(kept, running)

    async def _keep(self, kept: Kept, running: Mapping[str, Running]) -> Mapping[str, Running]:
        """Do a model's steps, one after the other; return what runs now, which is listed again after each step."""
        while True:
            entry = kept.entry
            there = running.get(entry.name)
            seen = await self._seen(kept, there)
            after = decide(seen, kept.done, time.time(), warm_up=entry.warm_up is not None, template=entry.template)
            if after.step is not kept.step:
                kept.step = after.step
                if after.step not in (Step.NONE, Step.REMOVE):
                    self._say(entry.name, after.step)
            if after.step in (Step.NONE, Step.WAIT):
                return running
            try:
                await self._do(after.step, kept, there)
                kept.problem = ""
            except Failure as failure:
                if kept.problem != str(failure):
                    kept.problem = str(failure)
                    self._say(
                        entry.name, f"{after.step} failed: {failure}" + (f" ({failure.advice})" * bool(failure.advice))
                    )
                self._note_failure(after.step, kept)
                return await asyncio.to_thread(self._pods.list)
            running = await asyncio.to_thread(self._pods.list)

    async def _seen(self, kept: Kept, there: Running | None) -> Seen:
        entry = kept.entry
        if there is not None and not there.running and there.ended > kept.ended:
            kept.ended = there.ended
            failures = failures_after(kept.done, there.started, there.ended)
            kept.done = replace(kept.done, healthy=False, warmed=False, settled=False, failures=failures)
            reason = f": {there.reason}" if there.reason else ""
            self._say(entry.name, f"its program has ended with status {there.exit_code}{reason}")
        return Seen(
            image=await asyncio.to_thread(self._pods.has_image, entry),
            pod=there is not None,
            same=there is not None and there.digest == entry.digest,
            running=there is not None and there.running,
            started=there.started if there else 0.0,
            ended=kept.ended,
            template=entry.template and await self._has_template(entry),
        )

    async def _do(self, step: Step, kept: Kept, there: Running | None) -> None:
        entry = kept.entry
        match step:
            case Step.PULL:
                await asyncio.to_thread(self._pods.pull, entry)
            case Step.REMOVE if there is not None:
                await asyncio.to_thread(self._pods.remove, there)
            case Step.START:
                await asyncio.to_thread(self._pods.start, entry)
            case Step.RESTORE:
                await asyncio.to_thread(self._pods.start, entry, self._template(entry))
                self._say(entry.name, "came back from its template, without loading")
            case Step.AWAIT:
                await self._await_health(kept)
            case Step.WARM:
                await self._warm_up(entry)
                kept.done = replace(kept.done, warmed=True)
            case Step.TEMPLATE:
                operation = await self._agent.checkpoint(
                    self._pod_name(entry), self._template(entry), deadline=TEMPLATE_SECONDS
                )
                await operation.result()
            case Step.SLEEP:
                await self._settle(entry)
                kept.done = replace(kept.done, settled=True)
                self._say(entry.name, f"ready at http://127.0.0.1:{entry.port}, suspended until it is asked")

    def _note_failure(self, step: Step, kept: Kept) -> None:
        """Note what a failed step means for the next ones."""
        done, now = kept.done, time.time()
        if step is Step.RESTORE:
            self._say(kept.entry.name, "its template does not restore here: it starts from the beginning")
            kept.done = replace(done, template_failed=True)
        elif step is Step.TEMPLATE:
            kept.done = replace(done, template_failed=True)
        elif step is Step.SLEEP:
            kept.done = replace(done, settled=True)  # it stays awake; the proxy suspends it when it is idle
        elif step is Step.WARM:
            kept.done = replace(done, warmed=True)
        elif step in (Step.START, Step.AWAIT):
            kept.done, kept.ended = replace(done, failures=done.failures + 1), now

    # -- steps

    async def _await_health(self, kept: Kept) -> None:
        """Return when the program answers its health check, or has ended. Raises Unavailable."""
        entry, end = kept.entry, time.monotonic() + kept.entry.start_timeout
        url = f"http://127.0.0.1:{entry.port}{entry.health}"
        while time.monotonic() < end:
            try:
                async with self._session.get(url, timeout=ClientTimeout(total=5)) as answer:
                    if answer.status < 300:
                        kept.done = replace(kept.done, healthy=True)
                        return
            except (ClientError, TimeoutError):
                pass
            there = (await asyncio.to_thread(self._pods.list)).get(entry.name)
            if there is None or not there.running:
                return  # the next look says with which status
            await asyncio.sleep(HEALTH_SECONDS)
        raise Unavailable(
            f"{url} was not answered with success for {entry.start_timeout:.0f} s",
            state="the program still runs",
            advice="look at `kybernate logs`; `health` and `start-timeout` of the model may be wrong",
        )

    async def _warm_up(self, entry: Entry) -> None:
        assert entry.warm_up is not None
        url = f"http://127.0.0.1:{entry.port}{entry.warm_up.path}"
        headers = {"Content-Type": "application/json"}
        try:
            limit = ClientTimeout(total=WARM_UP_SECONDS)
            async with self._session.post(url, data=entry.warm_up.body, headers=headers, timeout=limit) as answer:
                if answer.status >= 300:
                    text = (await answer.content.read(500)).decode(errors="replace")
                    raise Unavailable(f"{url} answered {answer.status}: {text}", state="the program keeps running")
        except (ClientError, TimeoutError) as error:
            raise Unavailable(f"{url} did not answer: {error}", state="the program keeps running") from error

    async def _settle(self, entry: Entry) -> None:
        """Suspend a model's GPU memory; a program that has none is ready as it is."""
        container = await self._agent.container(self._pod_name(entry))
        if container.gpu == "attached":
            await (await self._agent.suspend(self._pod_name(entry))).result()

    async def _has_template(self, entry: Entry) -> bool:
        try:
            await self._agent.image(f"{self._project}/{self._template(entry)}")
        except AgentRefused:
            return False
        return True

    def _template(self, entry: Entry) -> str:
        return f"{entry.name}-{entry.digest}"

    def _pod_name(self, entry: Entry) -> str:
        return f"{self._project}/{entry.name}"


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
        )
        for entry in file.models
    )
    return ProxySettings(listen=file.listen, models=models)


async def keep(path: Path, environment: Mapping[str, str], agent_address: str, say: Say, log: Log) -> None:
    """Keep the models of a file until SIGTERM or SIGINT; SIGHUP reads it again. What runs stays.

    Raises Invalid, Refused and AgentUnreachable.
    """
    file = load(path, environment)
    stopped, changed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, changed.set)
    pods = Pods(file.project)
    with _only_one(file.project):
        async with AsyncAgent(agent_address) as agent, ClientSession() as session:
            await agent.node()
            keeper = Keeper(file, pods, agent, session, say)
            while not stopped.is_set():
                changed.clear()
                settings = proxy_settings(file)
                running = await service.start(settings, AgentModels(agent, settings.models), log)
                say("", f"http://{file.listen[0]}:{running.port} answers for {len(file.models)} models")
                keeping = asyncio.create_task(keeper.run())
                waiting = [asyncio.create_task(one.wait()) for one in (stopped, changed)]
                await asyncio.wait([keeping, *waiting], return_when=asyncio.FIRST_COMPLETED)
                for task in waiting:
                    task.cancel()
                if keeping.done():
                    keeping.result()  # raises what ended it
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                await running.close()
                if changed.is_set() and not stopped.is_set():
                    file = _reread(path, environment, file, say)
                    keeper.change(file)
    pods.close()


def _reread(path: Path, environment: Mapping[str, str], file: ModelsFile, say: Say) -> ModelsFile:
    """Return the changed file; the former one, where it cannot be used."""
    try:
        found = load(path, environment)
    except Failure as failure:
        say("", f"the file is not used as it is now: {failure}")
        return file
    if found.project != file.project:
        say("", f"project cannot be changed while its models run: it stays {file.project}")
        return file
    return found


def down(project: str, say: Say) -> None:
    """Remove the containers of a project. Raises Failure, and Refused while `kybernate up` keeps them."""
    with _only_one(project):
        pods = Pods(project)
        for name, running in pods.list().items():
            pods.remove(running)
            say(name, "removed")
        pods.close()


def running_process(project: str) -> int:
    """Return the process that keeps a project; 0 where none does."""
    try:
        with (LOCKS / f"{project}.lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return int((LOCKS / f"{project}.lock").read_text() or 0)
    except OSError:
        return 0
    return 0


@contextmanager
def _only_one(project: str) -> Iterator[None]:
    """Hold the lock of a project, which ends with the process whatever ends that. Raises Refused."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / f"{project}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Refused(
                f"process {file.read() or '?'} keeps the models of the project {project}",
                advice="stop it, or name another project in the file",
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
