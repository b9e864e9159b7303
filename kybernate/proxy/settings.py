"""What `kybernate proxy` is told: /etc/kybernate/proxy.yaml, read and checked with the place of each mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from kybernate.proxy import document as doc
from kybernate.proxy.document import Item, Section

DEFAULT_PATH: Final = Path("/etc/kybernate/proxy.yaml")
PROGRESS: Final = ("none", "comments", "chunks")
CHOICES: Final = ("warm", "spillover", "weights")
PLANES: Final = ("embedded", "haproxy")
Listen = tuple[str, int]
One = TypeVar("One")


@dataclass(frozen=True)
class Queue:
    """How much may wait for one model: requests, bytes of their bodies, and seconds of each."""

    count: int = 512
    bytes: int = 64 << 20
    age: float = 300.0


@dataclass(frozen=True)
class Filters:
    """What is changed in a JSON body: `defaults` are set where absent, `strip` is removed, `override` replaces."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    strip: tuple[str, ...] = ()
    override: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.defaults or self.strip or self.override)


@dataclass(frozen=True)
class Probe:
    """What a probe of kubelet or a load balancer is answered while its model sleeps."""

    path: str
    status: int = 200
    body: str = "ok\n"


@dataclass(frozen=True)
class Model:
    """A program that sleeps and wakes: its container, its address, and how its requests are held.

    `concurrency` 0 means no limit, `idle` 0 that the proxy never suspends it. `container` may be empty: an address that
    is always awake.
    """

    name: str
    upstream: str
    container: str = ""
    namespace: str = ""
    aliases: tuple[str, ...] = ()
    upstream_model: str = ""
    concurrency: int = 0
    queue: Queue = Queue()
    idle: float = 0.0
    drain: float = 30.0
    wake_timeout: float = 300.0
    retry_after: float = 10.0
    progress: str = "none"
    progress_every: float = 5.0
    probes: tuple[Probe, ...] = ()
    filters: Filters = Filters()


@dataclass(frozen=True)
class Selector:
    """A name that stands for several models: the first that is awake, the first that is not busy, or by weights."""

    name: str
    choose: str
    of: tuple[str, ...]
    weights: tuple[int, ...] = ()


@dataclass(frozen=True)
class Peer:
    """Another host with an API of the same kind, and the models that are asked of it."""

    name: str
    url: str
    models: tuple[str, ...]
    key_file: Path | None = None


@dataclass(frozen=True)
class Route:
    """Requests with one of `hosts`, below one of `paths`, with these headers; what is empty is not asked for.

    `to` is a model, selector or model of a peer; empty means the one that the body names. `quota` is requests a minute
    of one key, or of one client where there are no keys; 0 means no limit.
    """

    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    to: str = ""
    keys: Path | None = None
    quota: int = 0


@dataclass(frozen=True)
class TcpRoute:
    """A port without HTTP. `wake_on` is "connection" or "data"; `proxy_protocol` sends its header (version 2)."""

    listen: Listen
    to: str
    wake_on: str = "connection"
    proxy_protocol: bool = False


@dataclass(frozen=True)
class Limits:
    """What one client may take. Bytes, seconds and counts."""

    head_line: int = 8190
    headers: int = 128
    body: int = 1 << 30
    prefix: int = 1 << 20
    filtered: int = 16 << 20
    head_seconds: float = 15.0
    body_seconds: float = 60.0
    send_seconds: float = 300.0
    idle_seconds: float = 75.0
    per_client: int = 1024


@dataclass(frozen=True)
class Agent:
    """Where the agent is; empty is the node's own. With `ca`, `certificate` and `key`, by mutual TLS."""

    address: str = ""
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""


@dataclass(frozen=True)
class Haproxy:
    """The child of the plane `haproxy`: its program, and lines that are added to what is generated."""

    binary: str = ""
    state: Path = Path("/run/kybernate/proxy")
    threads: int = 0
    extra_global: tuple[str, ...] = ()
    extra_defaults: tuple[str, ...] = ()
    extra_frontend: tuple[str, ...] = ()
    extra_backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """All of it."""

    listen: Listen = ("127.0.0.1", 8080)
    admin: Listen | None = None
    plane: str = "embedded"
    access_log: Path | None = None
    trusted: tuple[str, ...] = ()
    agent: Agent = Agent()
    models: tuple[Model, ...] = ()
    selectors: tuple[Selector, ...] = ()
    peers: tuple[Peer, ...] = ()
    routes: tuple[Route, ...] = (Route(),)
    tcp: tuple[TcpRoute, ...] = ()
    limits: Limits = Limits()
    haproxy: Haproxy = Haproxy()
    ext_proc: str = ""  # HOST:PORT or unix:PATH, where Envoy asks


def load(path: Path) -> Settings:
    """Return the settings of a file. Raises Invalid with the place of each mistake."""
    return parse(doc.read_text(path), str(path))


def parse(text: str, name: str = "proxy.yaml") -> Settings:
    """Return the settings in a text; raises as `load` does."""
    return doc.read_document(text, name, _settings)


def _settings(item: Item) -> Settings:
    section = Section(item)
    named: dict[str, Item] = {}
    found = Settings(
        listen=section.take("listen", doc.listen, Settings.listen),
        admin=section.take("admin", doc.listen, None),
        plane=section.take("plane", doc.among(*PLANES), Settings.plane),
        access_log=section.take("access_log", doc.absolute_path, None),
        trusted=section.take("trusted", _networks, ()),
        agent=section.take("agent", _agent, Agent()),
        models=section.take("models", _each(_model, named), ()),
        selectors=section.take("selectors", _each(_selector, named), ()),
        peers=section.take("peers", _each(_peer, {}), ()),
        routes=section.take("routes", _list(_route), Settings.routes),
        tcp=section.take("tcp", _list(_tcp), ()),
        limits=section.take("limits", _limits, Limits()),
        haproxy=section.take("haproxy", _haproxy, Haproxy()),
        ext_proc=section.take("ext_proc", doc.address, ""),
    )
    section.end()
    _check_names(found, named, item)
    for model in found.models:
        if found.plane != "haproxy" and (model.upstream or "").startswith("h2:"):
            named[model.name].problem(f"models.{model.name}.upstream: HTTP/2 needs plane: haproxy")
    return found


def _each(read: Callable[[str, Section], One], named: dict[str, Item]) -> Callable[[Item], tuple[One, ...]]:
    """Return a reader of a mapping from names to sections; the place of each name is kept in `named`."""

    def read_all(item: Item) -> tuple[One, ...]:
        found = []
        for name, one in item.entries().items():
            if name in named:
                one.problem(f"{name} is the name of another model or selector")
            named[name] = one
            section = Section(one)
            found.append(read(name, section))
            section.end()
        return tuple(found)

    return read_all


def _list(read: Callable[[Section], One]) -> Callable[[Item], tuple[One, ...]]:
    def read_all(item: Item) -> tuple[One, ...]:
        return tuple(_whole(one, read) for one in item.items())

    return read_all


def _whole(item: Item, read: Callable[[Section], One]) -> One:
    section = Section(item)
    found = read(section)
    section.end()
    return found


def _model(name: str, section: Section) -> Model:
    return Model(
        name=name,
        upstream=section.take("upstream", doc.url("http", "https", "tcp", "h2")),
        container=section.take("container", doc.text, ""),
        namespace=section.take("namespace", doc.text, ""),
        aliases=section.take("aliases", doc.texts, ()),
        upstream_model=section.take("upstream_model", doc.text, ""),
        concurrency=section.take("concurrency", doc.count, 0),
        queue=section.take("queue", lambda item: _whole(item, _queue), Queue()),
        idle=section.take("idle", doc.seconds, 0.0),
        drain=section.take("drain", doc.seconds, Model.drain),
        wake_timeout=section.take("wake_timeout", doc.seconds, Model.wake_timeout),
        retry_after=section.take("retry_after", doc.seconds, Model.retry_after),
        progress=section.take("progress", doc.among(*PROGRESS), "none"),
        progress_every=max(0.1, section.take("progress_every", doc.seconds, Model.progress_every)),
        probes=section.take("probes", _list(_probe), ()),
        filters=section.take("filters", lambda item: _whole(item, _filters), Filters()),
    )


def _queue(section: Section) -> Queue:
    return Queue(
        count=section.take("count", doc.count, Queue.count),
        bytes=section.take("bytes", doc.size, Queue.bytes),
        age=section.take("age", doc.seconds, Queue.age),
    )


def _probe(section: Section) -> Probe:
    return Probe(
        path=section.take("path", doc.text),
        status=section.take("status", _status, 200),
        body=section.take("body", doc.text, Probe.body),
    )


def _status(item: Item) -> int:
    number = doc.count(item)
    if not 200 <= number <= 599:
        raise ValueError("must be a status from 200 to 599")
    return number


def _filters(section: Section) -> Filters:
    return Filters(
        defaults=section.take("set", _values, {}),
        strip=section.take("strip", doc.texts, ()),
        override=section.take("override", _values, {}),
    )


def _values(item: Item) -> dict[str, Any]:
    return {name: doc.json_value(one) for name, one in item.entries().items()}


def _selector(name: str, section: Section) -> Selector:
    found = Selector(
        name=name,
        choose=section.take("choose", doc.among(*CHOICES)),
        of=section.take("of", doc.texts) or (),
        weights=section.take("weights", _counts, ()),
    )
    if found.choose == "weights" and (len(found.weights) != len(found.of) or not sum(found.weights)):
        section.item.problem(f"{section.item.path} needs as many weights as models, and not all of them 0")
    return found


def _counts(item: Item) -> tuple[int, ...]:
    return tuple(doc.count(one) for one in item.items())


def _peer(name: str, section: Section) -> Peer:
    return Peer(
        name=name,
        url=section.take("url", doc.url("http", "https")),
        models=section.take("models", doc.texts) or (),
        key_file=section.take("key_file", doc.absolute_path, None),
    )


def _route(section: Section) -> Route:
    return Route(
        hosts=tuple(host.lower() for host in section.take("host", doc.texts, ())),
        paths=section.take("path", doc.texts, ()),
        headers={name.lower(): value for name, value in section.take("headers", doc.text_map, {}).items()},
        to=section.take("to", doc.text, ""),
        keys=section.take("keys", doc.absolute_path, None),
        quota=section.take("quota", doc.count, 0),
    )


def _tcp(section: Section) -> TcpRoute:
    return TcpRoute(
        listen=section.take("listen", doc.listen),
        to=section.take("to", doc.text),
        wake_on=section.take("wake_on", doc.among("connection", "data"), "connection"),
        proxy_protocol=section.take("proxy_protocol", doc.yes_or_no, False),
    )


def _limits(item: Item) -> Limits:
    section = Section(item)
    sizes = {"head_line", "body", "prefix", "filtered"}
    counts = {"headers", "per_client"}
    values: dict[str, Any] = {}
    for name, default in vars(Limits()).items():
        read = doc.size if name in sizes else doc.count if name in counts else doc.seconds
        values[name] = section.take(name, read, default)
    section.end()
    return Limits(**values)


def _agent(item: Item) -> Agent:
    section = Section(item)
    found = Agent(
        address=section.take("address", doc.text, ""),
        ca=section.take("ca", doc.absolute_path, None),
        certificate=section.take("certificate", doc.absolute_path, None),
        key=section.take("key", doc.absolute_path, None),
        server_name=section.take("server_name", doc.text, ""),
    )
    section.end()
    if len({one is None for one in (found.ca, found.certificate, found.key)}) != 1:
        item.problem(f"{item.path} needs ca, certificate and key, or none of them")
    return found


def _haproxy(item: Item) -> Haproxy:
    section = Section(item)
    found = Haproxy(
        binary=section.take("binary", doc.text, ""),
        state=section.take("state", doc.absolute_path, Haproxy.state),
        threads=section.take("threads", doc.count, 0),
        extra_global=section.take("global", doc.texts, ()),
        extra_defaults=section.take("defaults", doc.texts, ()),
        extra_frontend=section.take("frontend", doc.texts, ()),
        extra_backends=section.take("backends", _lines_of_each, {}),
    )
    section.end()
    return found


def _lines_of_each(item: Item) -> dict[str, tuple[str, ...]]:
    return {name: doc.texts(one) for name, one in item.entries().items()}


def _networks(item: Item) -> tuple[str, ...]:
    from ipaddress import ip_network  # only where a proxy stands in front of this one

    found = doc.texts(item)
    for one in found:
        ip_network(one)
    return found


def _check_names(found: Settings, named: Mapping[str, Item], item: Item) -> None:
    """Report names that stand for two things, or for none."""
    owners: dict[str, str] = {}
    for name, owner in _all_names(found):
        if owners.setdefault(name, owner) != owner or (name != owner and name in named):
            named.get(owner, item).problem(f"{name} is a name of {owners[name]} and of {owner}")
    usable = {name for name, _ in _all_names(found)}
    for selector in found.selectors:
        for name in selector.of:
            if name not in usable or name in {one.name for one in found.selectors}:
                named[selector.name].problem(f"selectors.{selector.name}.of: no model is called {name}")
    for place, to in [*(("routes", one.to) for one in found.routes), *(("tcp", one.to) for one in found.tcp)]:
        if to and to not in usable:
            item.problem(f"{place}: to: no model or selector is called {to}")


def _all_names(found: Settings) -> Iterator[tuple[str, str]]:
    """Yield each name that a request may have, and what it belongs to."""
    for model in found.models:
        yield from ((name, model.name) for name in (model.name, *model.aliases))
    yield from ((one.name, one.name) for one in found.selectors)
    for peer in found.peers:
        yield from ((name, f"peer {peer.name}") for name in peer.models)


# ---- parts that other files have as well


def read_peers(item: Item) -> tuple[Peer, ...]:
    """Read a mapping of peers. Raises ValueError."""
    return _each(_peer, {})(item)


def read_selectors(item: Item) -> tuple[Selector, ...]:
    """Read a mapping of selectors. Raises ValueError."""
    return _each(_selector, {})(item)


def read_filters(item: Item) -> Filters:
    """Read the filters of a model. Raises ValueError."""
    return _whole(item, _filters)
