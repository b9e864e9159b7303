"""The configuration of seats: profiles, groups of GPUs, rules and windows, from YAML or from the same keys in TOML.

All problems are reported together, each with its key, and with its line and column where the document is YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from zoneinfo import ZoneInfo

import yaml

from kybernate.seats.groups import Group, Place, Profile, Topology, groups_of, places
from kybernate.seats.matrix import MatrixInvalid, read_matrix
from kybernate.seats.model import Rules
from kybernate.seats.windows import DAY_MINUTES, DAYS, Window

MOST_BYTES: Final = 1 << 20  # of a document
MOST_GPUS: Final = 64
MOST_SEATS: Final = 256  # of a group
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")
GROUP_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]{0,50}[A-Za-z0-9])?")
RESOURCE: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
CLOCK: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)|24:00")
SIZE: Final = re.compile(r"(\d+)\s*([KMGT]i?B?)?")
UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
Path = tuple[str | int, ...]


class SeatsInvalid(Exception):
    """A configuration of seats that cannot be used. `problems` has a sentence for each wrong key."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__(f"{source}: {'; '.join(problems)}")
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Configuration:
    """Profiles, the groups that are named (none: they are made of the topology), and the arbiter's rules."""

    profiles: tuple[Profile, ...] = ()
    groups: tuple[Group, ...] = ()
    rules: Rules = field(default_factory=Rules)
    waits_without_agent: bool = True

    def groups_for(self, topology: Topology) -> tuple[Group, ...]:
        """Return the groups of a node: those that are named, else those that its topology makes.

        Raises SeatsInvalid for a group with a GPU that the node has not.
        """
        if not self.groups:
            return tuple(groups_of(topology, (one.group_size for one in self.profiles)))
        missing = [one for one in self.groups if one.gpus[-1] >= topology.count]
        if missing:
            problems = [
                f"group {one.name} has GPU {one.gpus[-1]}, and the node has {topology.count}" for one in missing
            ]
            raise SeatsInvalid("gpuTopology", problems)
        return self.groups

    def places(self, topology: Topology) -> tuple[Place, ...]:
        """Return the seats of a node."""
        return tuple(places(self.profiles, self.groups_for(topology)))


def read_yaml(text: str, source: str, zone: Any = None) -> Configuration:
    """Return the configuration of a YAML document. Raises SeatsInvalid."""
    if len(text) > MOST_BYTES:
        raise SeatsInvalid(source, [f"larger than {MOST_BYTES} bytes"])
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SeatsInvalid(source, [f"not YAML: {' '.join(str(error).split())}"]) from error
    return read_document(document or {}, source, lambda path: _position(node, path), zone)


def read_document(
    document: object, source: str, position: Callable[[Path], str] = lambda path: "", zone: Any = None
) -> Configuration:
    """Return the configuration of a parsed document; `position` says where a key is. Raises SeatsInvalid."""
    reading = _Reading(position)
    found = reading.configuration(document, zone)
    if reading.problems:
        raise SeatsInvalid(source, reading.problems)
    return found


def _position(node: Any, path: Path) -> str:
    """Return LINE:COLUMN of a key, as far as the document has it."""
    mark = node.start_mark if node is not None else None
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pair = next((one for one in node.value if one[0].value == step), None)
            if pair is None:
                break
            mark, node = pair[0].start_mark, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            mark = node.start_mark
        else:
            break
    return f"{mark.line + 1}:{mark.column + 1}: " if mark is not None else ""


def _named(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".") or "the document"


def _text(pattern: re.Pattern[str], words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(words)
        return value

    return parse


def _whole(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return parse


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError("seconds, 0 or more")
    return float(value)


def _bytes(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('bytes, such as "24Gi"')
    return int(found[1]) << UNITS[(found[2] or "")[:1]]


def _minute(value: object) -> int:
    if not isinstance(value, str) or not CLOCK.fullmatch(value):
        raise ValueError('a time of day, such as "08:00"')
    hours, minutes = value.split(":")
    return int(hours) * 60 + int(minutes)


def _days(value: object) -> frozenset[int]:
    words = value if isinstance(value, list) else [value]
    found: set[int] = set()
    for word in words:
        first, _, last = str(word).lower().partition("-")
        if first not in DAYS or (last and last not in DAYS):
            raise ValueError('days, such as "mon-fri" or ["sat", "sun"]')
        start = DAYS.index(first)
        length = (DAYS.index(last) - start) % len(DAYS) if last else 0
        found.update((start + offset) % len(DAYS) for offset in range(length + 1))
    return frozenset(found)


def _zone(value: object) -> ZoneInfo:
    try:
        if isinstance(value, str) and value:
            return ZoneInfo(value)
    except (KeyError, OSError, ValueError):
        pass
    raise ValueError('a name of the tz database, such as "Europe/Berlin"')


def _share(value: object) -> bool:
    if value not in ("none", "vram"):
        raise ValueError('"none" or "vram"')
    return value == "vram"


def _without_agent(value: object) -> bool:
    if value not in ("wait", "start"):
        raise ValueError('"wait" or "start"')
    return value == "wait"


RULES: Final[Mapping[str, tuple[str, Callable[[object], Any]]]] = {
    "reserve": ("reserve_bytes", _bytes),
    "maximumWait": ("maximum_wait", _seconds),
    "minimumResidency": ("minimum_residency", _seconds),
    "slice": ("slice", _seconds),
    "yieldAfter": ("yield_after", _seconds),
    "idleAfter": ("idle_after", _seconds),
    "retries": ("retries", _whole(0, 1000)),
    "backoff": ("backoff", _seconds),
    "backoffLimit": ("backoff_limit", _seconds),
    "ramLow": ("ram_low", _bytes),
    "ramHigh": ("ram_high", _bytes),
}
TOP: Final = ("profiles", "gpuTopology", "share", "rules", "schedule", "timeZone", "matrix", "withoutAgent")


class _Reading:
    """One pass over a document."""

    def __init__(self, position: Callable[[Path], str]) -> None:
        self.problems: list[str] = []
        self._position = position

    def configuration(self, document: object, zone: Any) -> Configuration:
        values = self._mapping(document, (), TOP)
        profiles = tuple(self._each(values, "profiles", self._profile))
        topology = self._mapping(values.get("gpuTopology", {}), ("gpuTopology",), ("groups",))
        groups = tuple(self._each(topology, "groups", self._group, ("gpuTopology",)))
        self._consistent(profiles, groups)
        rules = self._rules(values)
        zone = self._value(values, "timeZone", (), _zone, zone)
        windows = tuple(self._each(values, "schedule", self._window))
        if zone is not None:
            rules = replace(rules, zone=zone)
        if values.get("matrix") is not None:
            try:
                rules = replace(rules, matrix=read_matrix(values["matrix"]))
            except MatrixInvalid as error:
                self._problem(("matrix",), str(error))
        waits = self._value(values, "withoutAgent", (), _without_agent, True)
        return Configuration(profiles, groups, replace(rules, windows=windows), waits)

    def _problem(self, path: Path, text: str) -> None:
        self.problems.append(f"{self._position(path)}{text}")

    def _mapping(self, value: object, path: Path, known: Sequence[str]) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self._problem(path, f"{_named(path)} must be a mapping, not {value!r}")
            return {}
        for key in value:
            if key not in known:
                self._problem((*path, key), f"unknown key {_named((*path, key))}; there are {', '.join(known)}")
        return value

    def _each(
        self, values: Mapping[str, Any], key: str, read: Callable[[object, Path], Any], above: Path = ()
    ) -> Iterator[Any]:
        found = values.get(key) or []
        if not isinstance(found, list):
            self._problem((*above, key), f"{_named((*above, key))} must be a list")
            return
        for number, value in enumerate(found):
            before = len(self.problems)
            one = read(value, (*above, key, number))
            if len(self.problems) == before:
                yield one

    def _value(
        self, values: Mapping[str, Any], key: str, above: Path, parse: Callable[[object], Any], default: Any = None
    ) -> Any:
        path = (*above, key)
        if key not in values:
            if default is None and above:
                self._problem(above, f"{_named(path)} is missing")
            return default
        try:
            return parse(values[key])
        except ValueError as error:
            self._problem(path, f"{_named(path)} must be {error}, not {values[key]!r}")
            return default

    def _profile(self, value: object, path: Path) -> Profile:
        values = self._mapping(value, path, ("name", "resource", "groupSize", "seatsPerGroup"))
        return Profile(
            self._value(values, "name", path, _text(NAME, "a DNS label of 32 letters at most")),
            self._value(values, "resource", path, _text(RESOURCE, "DOMAIN/NAME, such as kyb.ai/gpu-1x-seat")),
            self._value(values, "groupSize", path, _whole(1, MOST_GPUS)),
            self._value(values, "seatsPerGroup", path, _whole(1, MOST_SEATS)),
        )

    def _group(self, value: object, path: Path) -> Group:
        values = self._mapping(value, path, ("name", "gpus"))
        name = self._value(values, "name", path, _text(GROUP_NAME, "letters, digits and dashes"))
        gpus = self._value(values, "gpus", path, _gpus)
        return Group(name, gpus)

    def _window(self, value: object, path: Path) -> Window:
        values = self._mapping(value, path, ("days", "from", "to", "prefer"))
        days = self._value(values, "days", path, _days, frozenset(range(7)))
        start = self._value(values, "from", path, _minute)
        end = self._value(values, "to", path, _minute)
        if start == DAY_MINUTES:
            self._problem((*path, "from"), f"{_named((*path, 'from'))} must be before 24:00")
        prefer = self._value(values, "prefer", path, _text(NAME, "a kind of work, such as inference"))
        return Window(days, start, end, prefer)

    def _rules(self, values: Mapping[str, Any]) -> Rules:
        given = self._mapping(values.get("rules", {}), ("rules",), tuple(RULES))
        share = self._value(values, "share", (), _share, False)
        defaults = Rules(share_vram=share)
        changes = {
            field: self._value(given, key, ("rules",), parse, getattr(defaults, field))
            for key, (field, parse) in RULES.items()
        }
        rules = replace(defaults, **changes)
        if rules.maximum_wait <= rules.minimum_residency:
            self._problem(("rules",), "rules.maximumWait must be longer than rules.minimumResidency")
        if rules.ram_high < rules.ram_low:
            self._problem(("rules",), "rules.ramHigh must not be below rules.ramLow")
        return rules

    def _consistent(self, profiles: Sequence[Profile], groups: Sequence[Group]) -> None:
        named: tuple[tuple[str, Path, list[Any]], ...] = (
            ("profile", ("profiles",), [one.name for one in profiles]),
            ("resource", ("profiles",), [one.resource for one in profiles]),
            ("size of groups", ("profiles",), [one.group_size for one in profiles]),
            ("group", ("gpuTopology", "groups"), [one.name.lower() for one in groups]),
            ("set of GPUs", ("gpuTopology", "groups"), [one.gpus for one in groups]),
        )
        for what, key, names in named:
            for name in sorted({str(one) for one in names if names.count(one) > 1}):
                self._problem(key, f"there is more than one {what} {name}")
        sizes = {one.group_size for one in profiles}
        for number, one in enumerate(groups):
            if len(one.gpus) not in sizes:
                self._problem(
                    ("gpuTopology", "groups", number), f"group {one.name} has {len(one.gpus)} GPUs, as no profile has"
                )


def _gpus(value: object) -> tuple[int, ...]:
    whole = _whole(0, MOST_GPUS - 1)
    if not isinstance(value, list) or not value:
        raise ValueError("a list of indices of GPUs")
    found = tuple(sorted(map(whole, value)))
    if len(set(found)) != len(found):
        raise ValueError("a list of different indices of GPUs")
    return found
