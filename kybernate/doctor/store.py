"""The store of checkpoint images: whether it answers, is one of this node's key, and whether the agent can use it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from kybernate.agent.settings import StoreSettings
from kybernate.node.failure import Failure
from kybernate.node.finding import HealthFinding

ANSWER_SECONDS: Final = 15.0


@dataclass(frozen=True)
class StoreFacts:
    """What was found. `url` is "" where no store is configured. `problem` and `advice` are of a store that failed.

    `service` is what the service or these credentials lack, a sentence each. `lacking`: variables with credentials that
    this process has and the agent has not.
    """

    url: str = ""
    id: str = ""
    encrypted: bool = False
    problem: str = ""
    advice: str = ""
    service: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


# ---- what it means


def findings(facts: StoreFacts) -> Iterator[HealthFinding]:
    """Yield the verdict on the store; nothing where none is configured."""
    if not facts.url:
        yield HealthFinding("store", "ok", "none is configured")
    elif facts.problem:
        yield HealthFinding("store", "bad", facts.problem, facts.advice or "look at the endpoint and the network")
    else:
        encrypted = ", encrypted" if facts.encrypted else ""
        yield HealthFinding("store", "ok", f"{facts.url} answers, id {facts.id}, of this node's key{encrypted}")
    for words in facts.service:
        yield HealthFinding("store's service", "note", words, 'what that means is in docs/store.md, "Services"')
    if facts.lacking:
        words = ", ".join(facts.lacking)
        advice = "write them to /etc/kybernate/agent.env (mode 0600), then `systemctl restart kybernate-agent`"
        yield HealthFinding("agent's credentials", "bad", f"this shell has {words}, and the agent has not", advice)


# ---- what is there


def gather(settings: StoreSettings, agent: int) -> StoreFacts:
    """Open the store that the agent's settings name, and try it; `agent` is the agent's process, 0 without one."""
    if not settings.url:
        return StoreFacts()
    try:
        from kybernate.store.answers import missing_variables
        from kybernate.store.place import StorePlace, open_store
        from kybernate.store.probe import probe
    except ModuleNotFoundError as error:
        advice = "install the package with its extra `all`, or `store`"
        return StoreFacts(settings.url, problem=f"{error.name} is not installed", advice=advice)
    place = StorePlace(settings.url, settings.key, settings.encrypted, settings.endpoint, settings.region, settings.ca)
    others = _environment(agent)
    own = psutil.Process().environ()
    missing = missing_variables(settings.url, others) if others is not None else ()
    lacking = tuple(name for name in missing if own.get(name))

    async def asked() -> tuple[str, list[str]]:
        async with asyncio.timeout(ANSWER_SECONDS):
            store = open_store(place)
            try:
                await store.open()
                return store.id, await probe(store.objects)
            finally:
                store.close()

    try:
        id, service = asyncio.run(asked())
        return StoreFacts(settings.url, id, settings.encrypted, service=tuple(service), lacking=lacking)
    except TimeoutError:
        problem, advice = f"{settings.url}: no answer within {ANSWER_SECONDS:.0f} s", ""
    except Failure as error:
        problem, advice = str(error), error.advice
    return StoreFacts(settings.url, problem=problem, advice=advice, lacking=lacking)


def _environment(pid: int) -> Mapping[str, str] | None:
    """Return the environment of a process, None where it cannot be read."""
    try:
        return psutil.Process(pid).environ() if pid else None
    except (psutil.Error, OSError):
        return None
