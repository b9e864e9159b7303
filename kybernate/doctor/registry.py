"""The catalogue of images: whether its database answers, and has tables that this release reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kybernate.node.failure import Failure
from kybernate.node.finding import HealthFinding
from kybernate.registry.location import DEFAULT_URL, registry_url

FILE = "sqlite:///"


@dataclass(frozen=True)
class RegistryFacts:
    """What was found. `shown` is the URL without a password; `absent`: no process has made the file yet."""

    shown: str
    images: int = 0
    absent: bool = False
    problem: str = ""
    advice: str = ""


def findings(facts: RegistryFacts) -> Iterator[HealthFinding]:
    """Yield the verdict on the registry."""
    if facts.problem:
        advice = facts.advice or "`kybernate registry rebuild` makes it again from the images"
        yield HealthFinding("registry", "bad", f"{facts.shown}: {facts.problem}", advice)
    elif facts.absent:
        yield HealthFinding("registry", "ok", f"{facts.shown}: made by the agent's first start")
    else:
        yield HealthFinding("registry", "ok", f"{facts.shown}: {facts.images} images")


def gather(configured: str) -> RegistryFacts:
    """Open the registry that the agent's settings name. A file that is not there is not made."""
    url = configured or registry_url()
    if url.startswith(FILE) and not Path(url.removeprefix(FILE)).exists():
        return RegistryFacts(url if url != DEFAULT_URL else url.removeprefix(FILE), absent=True)
    try:
        from kybernate.registry.catalogue import Catalogue
    except ModuleNotFoundError as error:
        advice = "install the package with its extra `all`, or `agent`"
        return RegistryFacts(url, problem=f"{error.name} is not installed", advice=advice)
    try:
        with Catalogue(url, retry_seconds=0) as catalogue:
            return RegistryFacts(catalogue.database.shown, catalogue.totals().images)
    except Failure as error:
        return RegistryFacts(url.rpartition("@")[2], problem=str(error), advice=error.advice)
