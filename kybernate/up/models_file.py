"""models.yaml: what `kybernate up` runs, read and checked with the place of each mistake."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from kybernate.node.failure import Invalid
from kybernate.proxy import document as doc
from kybernate.proxy.document import Item, Section
from kybernate.proxy.settings import Filters, Peer, Selector, read_filters, read_peers, read_selectors
from kybernate.seats.matrix import Matrix, MatrixInvalid, read_matrix
from kybernate.seats.windows import DAY_MINUTES, DAYS, Window

NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", re.ASCII)  # it is part of the names of pods and images
VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
QUOTED: Final = re.compile(r"""(["'])(.*?)\1(?:\s+#.*)?""")  # a value of a file of variables
FIRST_PORT: Final = 18_000  # of models that name none: one after the other, in the order of the file
OWN_VARIABLES: Final = frozenset({"PORT", "MODEL"})  # are set for each model, and stay for its command
ROUTING: Final = frozenset(  # keys that need no other container
    {
        "aliases",
        "upstream_model",
        "idle",
        "disk_after",
        "concurrency",
        "priority",
        "template",
        "start_timeout",
        "filters",
    }
)
NETWORKS: Final = ("host", "pod")
MODES: Final = ("ro", "rw")


@dataclass(frozen=True)
class Mount:
    """A file or directory of the host, at a place in the container."""

    source: str
    target: str
    writable: bool = False


@dataclass(frozen=True)
class WarmUp:
    """A request that is sent once a model is healthy, before its template is taken."""

    path: str
    body: str = ""


@dataclass(frozen=True)
class Entry:
    """A model: how its program is started, and how requests reach it. Times are in seconds.

    Without `image` the command's files are those of the host. `devices` are CDI names.
    """

    name: str
    port: int
    image: str = ""
    command: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    user: int | None = None
    health: str = "/health"
    start_timeout: float = 600.0
    warm_up: WarmUp | None = None
    template: bool = True
    aliases: tuple[str, ...] = ()
    upstream_model: str = ""
    idle: float = 300.0
    disk_after: float = 0.0
    concurrency: int = 0
    priority: int = 0
    seat: str = ""
    arena: bool = True
    network: str = "host"
    windows: tuple[Window, ...] = ()
    filters: Filters = field(default_factory=Filters)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def digest(self) -> str:
        """Return what changes with all that needs another container: 12 hexadecimal digits."""
        shape = asdict(replace(self, windows=()))
        shape = {name: value for name, value in shape.items() if name not in ROUTING}
        for name in ("seat", "arena", "network"):  # later keys: templates of files without them stay
            if shape[name] == getattr(Entry, name):
                del shape[name]
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ModelsFile:
    """The whole file. `project` names its pods, so that two files do not take each other's."""

    project: str
    listen: tuple[str, int]
    models: tuple[Entry, ...]
    variables: tuple[Path, ...] = ()  # files of them
    peers: tuple[Peer, ...] = ()
    selectors: tuple[Selector, ...] = ()
    matrix: Matrix | None = None  # which may be awake together; sizes alone decide where there is none
    keys: Path | None = None


def load(path: Path, environment: Mapping[str, str]) -> ModelsFile:
    """Return what a file says. Raises Invalid."""
    try:
        return parse(doc.read_text(path), str(path), environment)
    except Invalid as failure:
        raise _invalid(failure) from failure


def parse(text: str, name: str, environment: Mapping[str, str]) -> ModelsFile:
    """Return what a text says; `environment` is what `${NAME}` stands for. Raises Invalid."""
    values = dict(environment)
    try:
        return doc.read_document(text, name, lambda item: _file(item, Path(name).parent, values))
    except Invalid as failure:
        raise _invalid(failure) from failure


def _invalid(failure: Invalid) -> Invalid:
    return Invalid(
        str(failure),
        state="nothing was changed",
        advice="correct the file; `kybernate up --check` reads it without starting anything",
    )


def _file(item: Item, directory: Path, values: dict[str, str]) -> ModelsFile:
    files = tuple(directory / path for path in _environment_files(item))
    for path in files:
        found = _variables_of(path, item.entries()["env_file"])
        values |= {one: text for one, text in found.items() if one not in values}
    _substitute(item, item.node, values)
    section = Section(item)
    section.take("env_file", doc.texts, ())
    defaults = section.take("defaults", lambda one: one, None)
    project = section.take("project", _name, "models")
    listen = section.take("listen", doc.listen, ("127.0.0.1", 8080))
    models = section.take("models", lambda one: _models(one, defaults), ())
    peers = section.take("peers", read_peers, ())
    if not section.has("models", "peers"):
        item.problem("the document has no models: `kybernate up --init` writes an example")
    selectors = section.take("selectors", read_selectors, ())
    matrix = section.take("matrix", lambda one: _matrix(one, models or ()), None)
    keys = section.take("keys", doc.absolute_path, None)
    section.end()
    _check(models or (), item)
    _check_selectors(selectors, {*(name for one in models or () for name in one.names), *_of_peers(peers)}, item)
    return ModelsFile(project, listen, models or (), files, peers, selectors, matrix, keys)


def _matrix(item: Item, models: tuple[Entry, ...]) -> Matrix:
    try:
        found = read_matrix(item.value)
    except MatrixInvalid as error:
        raise ValueError(str(error).removeprefix("matrix")) from error
    if unknown := sorted(found.names - {one.name for one in models}):
        raise ValueError(f"names {', '.join(unknown)}, and there is no such model")
    return found


def _of_peers(peers: tuple[Peer, ...]) -> Iterator[str]:
    return (name for peer in peers for name in peer.models)


def _check_selectors(selectors: tuple[Selector, ...], names: Set[str], item: Item) -> None:
    """Report selectors with the name of a model, and those of a model that is none."""
    for selector in selectors:
        if selector.name in names:
            item.problem(f"selectors.{selector.name} is the name of a model, too")
        for name in sorted({*selector.of} - names):
            item.problem(f"selectors.{selector.name}.of: no model is called {name}")


def _environment_files(item: Item) -> tuple[str, ...]:
    try:
        found = item.entries().get("env_file")
        return doc.texts(found) if found else ()
    except ValueError:
        return ()  # reported by the reading of the key itself


def _variables_of(path: Path, item: Item) -> dict[str, str]:
    """Return NAME=VALUE of each line of a file, as shells and docker have it: with quotes, `export` and # comments."""
    found = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        item.problem(f"env_file: {path} cannot be read: {error}")
        return {}
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals:
            item.problem(f"env_file: {path}:{number} is not NAME=VALUE")
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    """Return a value without its quotes; one that has none ends before ` #`."""
    if (quoted := QUOTED.fullmatch(value)) is not None:
        return quoted[2]
    return "" if value.startswith("#") else value.partition(" #")[0].rstrip()


def _substitute(item: Item, node: yaml.Node, values: Mapping[str, str]) -> None:
    """Replace ${NAME} and ${NAME:-DEFAULT} in all values below a node, each with the meaning that its text has then."""
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            _substitute(item, value, values)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _substitute(item, value, values)
    elif isinstance(node, yaml.ScalarNode) and "${" in node.value:

        def value_of(found: re.Match[str]) -> str:
            name, default = found[1], found[2]
            if name in OWN_VARIABLES:
                return found[0]
            if name not in values and default is None:
                item.problem(f"the variable {name} is not set", node)
            return values.get(name, default or "")

        node.value = VARIABLE.sub(value_of, node.value)
        if not node.style:  # plain: 18${N} is a number once N is known
            resolve: Any = yaml.resolver.Resolver().resolve  # published without types
            node.tag = resolve(yaml.ScalarNode, node.value, (True, False))


def _models(item: Item, defaults: Item | None) -> tuple[Entry, ...]:
    found = []
    for index, (name, one) in enumerate(item.entries().items()):
        if not NAME.fullmatch(name):
            one.problem(f"{name!r} cannot be a model's name: small letters, digits and hyphens, at most 42")
        section = Section(_with_defaults(one, defaults))
        found.append(_entry(name, section, FIRST_PORT + index))
        section.end()
    return tuple(found)


def _with_defaults(item: Item, defaults: Item | None) -> Item:
    """Return a model's mapping with the keys of `defaults` that it lacks."""
    if defaults is None or not isinstance(item.node, yaml.MappingNode):
        return item
    if not isinstance(defaults.node, yaml.MappingNode):
        defaults.problem("defaults must be a mapping of keys to values")
        return item
    own = {key.value for key, _ in item.node.value}
    inherited = [pair for pair in defaults.node.value if pair[0].value not in own]
    merged = yaml.MappingNode(item.node.tag, [*item.node.value, *inherited], item.node.start_mark, item.node.end_mark)
    return item.replaced(merged)


def _entry(name: str, section: Section, port: int) -> Entry:
    port = section.take("port", _port, port)
    image = section.take("image", doc.text, "")
    command = section.take("command", _command, ())
    if not image and not command:
        section.item.problem(f"{section.item.path} needs an image or a command")
    return Entry(
        name=name,
        port=port,
        image=image,
        command=tuple(_own(word, name, port) for word in command),
        devices=section.take("gpus", _devices, ()),
        environment={
            **{key: _own(value, name, port) for key, value in section.take("env", _variables, {}).items()},
            "PORT": str(port),
        },
        mounts=section.take("mounts", _mounts, ()),
        user=section.take("user", doc.count, None),
        health=section.take("health", _path, Entry.health),
        start_timeout=section.take("start-timeout", doc.seconds, Entry.start_timeout),
        warm_up=section.take("warm-up", lambda item: _warm_up(item, name), None),
        template=section.take("template", doc.yes_or_no, True),
        aliases=section.take("aliases", doc.texts, ()),
        upstream_model=section.take("upstream-model", doc.text, ""),
        idle=section.take("idle-timeout", doc.seconds, Entry.idle),
        disk_after=section.take("disk-after", doc.seconds, 0.0),
        concurrency=section.take("concurrency", doc.count, 0),
        priority=section.take("priority", doc.count, 0),
        seat=section.take("seat", doc.text, ""),
        arena=section.take("arena", doc.yes_or_no, True),
        network=section.take("network", doc.among(*NETWORKS), Entry.network),
        windows=section.take("windows", _windows, ()),
        filters=section.take("filters", read_filters, Filters()),
    )


def _own(text: str, model: str, port: int) -> str:
    return text.replace("${PORT}", str(port)).replace("${MODEL}", model)


def _name(item: Item) -> str:
    value = doc.text(item)
    if not NAME.fullmatch(value):
        raise ValueError("must be small letters, digits and hyphens, at most 42")
    return value


def _port(item: Item) -> int:
    value = doc.count(item)
    if not 0 < value < 1 << 16:
        raise ValueError("must be a port from 1 to 65535")
    return value


def _command(item: Item) -> tuple[str, ...]:
    """Read a list of words, or one text that is split as a shell does."""
    if not isinstance(item.value, str):
        return doc.texts(item)
    try:
        return tuple(shlex.split(item.value))
    except ValueError as error:
        raise ValueError("has a quote without its end") from error


def _path(item: Item) -> str:
    value = doc.text(item)
    if not value.startswith("/"):
        raise ValueError("must begin with /")
    return value


def _devices(item: Item) -> tuple[str, ...]:
    """Read a list of a GPU's index, "all", or another CDI name."""
    found = []
    for one in item.items() if isinstance(item.value, list) else [item]:
        value = one.value
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise ValueError('must be the index of a GPU, "all", or a CDI name such as nvidia.com/gpu=0')
        found.append(value if isinstance(value, str) and "=" in value else f"nvidia.com/gpu={value}")
    return tuple(found)


def _variables(item: Item) -> dict[str, str]:
    return {name: str(one.value) if one.value is not None else "" for name, one in item.entries().items()}


def _mounts(item: Item) -> tuple[Mount, ...]:
    """Read texts of the form SOURCE:TARGET, with :ro or :rw; read-only where neither is given."""
    found = []
    for text in doc.texts(item):
        source, _, rest = text.partition(":")
        target, _, mode = rest.partition(":")
        target = target or source
        if not source.startswith("/") or not target.startswith("/") or mode not in ("", *MODES):
            raise ValueError(f"{text!r} must be /SOURCE:/TARGET, or /SOURCE:/TARGET:rw")
        found.append(Mount(source, target, mode == "rw"))
    return tuple(found)


def _windows(item: Item) -> tuple[Window, ...]:
    """Read a list of windows: `days` such as mon-fri or [sat, sun], `from` and `to` such as 08:30."""
    found = []
    for one in item.items():
        section = Section(one)
        days = section.take("days", _days, frozenset(range(len(DAYS))))
        start, end = section.take("from", _minute, 0), section.take("to", _minute, 0)
        section.end()
        found.append(Window(days, start, end, ""))
    return tuple(found)


def _days(item: Item) -> frozenset[int]:
    found: set[int] = set()
    for text in doc.texts(item):
        first, _, last = text.partition("-")
        if first not in DAYS or (last or first) not in DAYS:
            raise ValueError(f"has {text!r}: days are {', '.join(DAYS)}, or a range such as mon-fri")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        found |= {day % len(DAYS) for day in range(begin, (end if end >= begin else end + len(DAYS)) + 1)}
    return frozenset(found)


def _minute(item: Item) -> int:
    """Read HH:MM, which YAML may have taken for a number of base 60."""
    value = item.value
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", value, re.ASCII) if isinstance(value, str) else None
    minute = int(found[1]) * 60 + int(found[2]) if found else value
    if isinstance(minute, bool) or not isinstance(minute, int) or not 0 <= minute <= DAY_MINUTES:
        raise ValueError("must be a time of the day such as '08:30'")
    return minute % DAY_MINUTES


def _warm_up(item: Item, name: str) -> WarmUp:
    section = Section(item)
    found = WarmUp(
        path=section.take("path", _path, "/v1/chat/completions"),
        body=section.take("body", _body, ""),
    )
    section.end()
    return WarmUp(found.path, found.body.replace("${MODEL}", name))


def _body(item: Item) -> str:
    value = doc.json_value(item)
    return value if isinstance(value, str) else json.dumps(value)


def _check(models: tuple[Entry, ...], item: Item) -> None:
    """Report ports and names that two models have, at the second of them."""
    places = item.entries()["models"].entries() if models else {}
    ports: dict[int, str] = {}
    names: dict[str, str] = {}
    for model in models:
        if ports.setdefault(model.port, model.name) != model.name:
            places[model.name].problem(
                f"models.{model.name}: port: {model.port} is the port of {ports[model.port]}, too"
            )
        for name in (model.name, *model.aliases):
            if names.setdefault(name, model.name) != model.name:
                places[model.name].problem(f"models.{model.name}: {name} is a name of {names[name]}, too")
