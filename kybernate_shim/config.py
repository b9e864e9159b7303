"""The shim's settings: `/etc/kybernate/shim.toml`, and what the runtime options from containerd change in it.

Every setting is one line of a dataclass here, with its default, its form, its unit, who may change it and what it is
for; the manual's table is made from the same lines. A new table is a new dataclass and one line in `Config`.
A key that nobody knows is a warning, so that a file may be newer than the shim; a value of the wrong form is an error,
because going on with the default would run containers in a way that the file forbids.
"""

# ruff: noqa: RUF009  (settings are dataclass fields; their declarations only call dataclasses.field)
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

DEFAULT_PATH: Final = Path("/etc/kybernate/shim.toml")

NODE: Final = "node"  # only the node's own file may set it
MOST_THREADS: Final = 256
HUGE_PAGE: Final = 2 << 20
NO_NODE: Final = -1  # in the place of a NUMA node: none in particular, as the kernel has it
NodeSizes = tuple[tuple[int, int], ...]  # NUMA nodes, and bytes on each
OPTIONS: Final = "options"  # the runtime options that come with a container may change it

# When a change of the node's file is in effect.
LIVE: Final = "at once"  # at the next call; an operation that runs keeps what it began with
CONTAINER: Final = "new containers"
POD: Final = "new pods"
SERVER: Final = "next fork server"


class ConfigInvalid(Exception):
    """A configuration that cannot be used. The message names the source and every wrong key at once."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: {'; '.join(problems)}")


@dataclass(frozen=True)
class Form:
    """What a value must look like, in words and as a parser that raises ValueError."""

    words: str
    parse: Callable[[object], Any]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _switch(value: object) -> bool | None:
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ValueError
    return value


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError
    return float(value)


def _share(value: object) -> float:
    number = _seconds(value)
    if not 0 < number <= 1:
        raise ValueError
    return number


def _directory(value: object) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError
    return path


def _optional_path(value: object) -> Path | None:
    return None if value == "" else _directory(value)


def _criu(value: object) -> Path | None:
    path = _optional_path(value)
    if path is not None and path.name != "criu":
        raise ValueError
    return path


def _level(value: object) -> str:
    if value not in ("debug", "info", "warning", "error"):
        raise ValueError
    return _text(value)


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(_text(item) for item in value)


def _directories(value: object) -> tuple[Path, ...]:
    return tuple(map(_directory, _texts(value)))


def _among(*words: str) -> Form:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return _text(value)

    return Form(" or ".join(f'"{word}"' for word in words), parse)


def _whole_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_THREADS:
        raise ValueError
    return value


def _bytes(value: object) -> int:
    """Read "48GiB", "512 MiB" or a plain number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    number, unit = (str(value), "") if isinstance(value, int) else _split_unit(value)
    if not number.isdecimal():
        raise ValueError
    return int(number) << UNITS[unit]


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError
    sizes = tuple(map(_bytes, value))
    if not all(sizes) or any(size % HUGE_PAGE for size in sizes):
        raise ValueError
    return sizes


def _node_sizes(value: object) -> NodeSizes:
    """Read bytes, or a table of them whose keys are numbers of NUMA nodes; what is 0 is left out."""
    table = value if isinstance(value, dict) else {str(NO_NODE): value}
    if isinstance(value, dict) and not all(isinstance(node, str) and node.isdecimal() for node in value):
        raise ValueError
    return tuple(sorted((int(node), size) for node, one in table.items() if (size := _bytes(one))))


def _split_unit(text: str) -> tuple[str, str]:
    unit = next((name for name in UNITS if name and text.endswith(name)), "")
    return text.removesuffix(unit).strip(), unit


# What nvidia-container-cli and NVIDIA's CDI specifications mount: programs, libraries, firmware and sockets of the
# driver.
HOOK_MOUNTS: Final = (
    "/usr/bin/nvidia-*",
    "/usr/lib/*/libnvidia-*",
    "/usr/lib/*/libcuda*",
    "/usr/lib/*/libnvcuvid*",
    "/usr/lib/*/libnvoptix*",
    "/usr/lib/*/vdpau/libvdpau_nvidia*",
    "/usr/lib64/libnvidia-*",
    "/usr/lib64/libcuda*",
    "/lib/firmware/nvidia/*/gsp_*.bin",
    "/usr/lib/firmware/nvidia/*/gsp_*.bin",
    "/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
    "/usr/share/nvidia/*",
)
UNITS: Final[Mapping[str, int]] = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
TEXT = Form("a string", _text)
SWITCH = Form('"auto", true or false', _switch)
SIZES = Form('a list of numbers of bytes, such as ["18GiB", "18GiB"], multiples of 2 MiB', _sizes)
NODE_SIZES = Form(
    'a number of bytes, such as "64GiB", or one for each NUMA node, such as { 0 = "32GiB", 1 = "32GiB" }', _node_sizes
)
YES_OR_NO = Form("true or false", _yes_or_no)
SECONDS = Form("a number of seconds, 0 or more", _seconds)
SHARE = Form("a number above 0 and up to 1", _share)
DIRECTORY = Form("an absolute path", _directory)
OPTIONAL_PATH = Form('an absolute path, or "" for none', _optional_path)
CRIU = Form('an absolute path that ends in /criu, the name that runtimes look for in PATH, or "" for PATH', _criu)
LEVEL = Form('"debug", "info", "warning" or "error"', _level)
TEXTS = Form("a list of strings", _texts)
DIRECTORIES = Form("a list of absolute paths", _directories)
THREADS = Form(f"a number from 1 to {MOST_THREADS}, 0 to choose", _whole_number)


@dataclass(frozen=True)
class Setting:
    """How a key is read and documented. `by` is NODE or OPTIONS; `unset` says what an empty default leads to.

    `since` says for what a change of the file is in effect: LIVE, CONTAINER, POD or SERVER.
    """

    form: Form
    doc: str
    by: str
    unset: str
    since: str


def setting(default: object, form: Form, doc: str, *, by: str = NODE, unset: str = "", since: str = LIVE) -> Any:
    """Declare a key of a configuration table."""
    return field(default=default, metadata={"setting": Setting(form, doc, by, unset, since)})


def table(kind: type[Any]) -> Any:
    """Declare a table in the table; `kind` is a frozen dataclass of settings that all have defaults."""
    return field(default_factory=kind, metadata={"table": kind})


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of work may take, in seconds; 0 means for ever. What outlives its deadline is killed."""

    create: float = setting(120.0, SECONDS, "the OCI runtime creates a container", by=OPTIONS)
    start: float = setting(120.0, SECONDS, "it starts one, hooks included", by=OPTIONS)
    exec: float = setting(120.0, SECONDS, "it starts a further process in one", by=OPTIONS)
    kill: float = setting(10.0, SECONDS, "it sends a signal", by=OPTIONS)
    query: float = setting(10.0, SECONDS, "it answers state, ps or features", by=OPTIONS)
    delete: float = setting(30.0, SECONDS, "it removes a container", by=OPTIONS)
    freeze: float = setting(30.0, SECONDS, "it pauses or resumes one", by=OPTIONS)
    update: float = setting(30.0, SECONDS, "it changes the limits of one", by=OPTIONS)
    checkpoint: float = setting(
        3600.0, SECONDS, "a checkpoint, all steps together: 1 TiB at 300 MB/s takes this long", by=OPTIONS
    )
    restore: float = setting(1800.0, SECONDS, "a restore, all steps together: 512 GiB at 300 MB/s", by=OPTIONS)
    io_drain: float = setting(
        10.0, SECONDS, "a process that has ended may leave output unread before Delete goes on", by=OPTIONS
    )


@dataclass(frozen=True)
class Gpu:
    """How GPU state is taken out and brought back. The driver's steps may take so many seconds each."""

    lock: float = setting(60.0, SECONDS, "queued work of all processes drains", by=OPTIONS)
    checkpoint: float = setting(600.0, SECONDS, "VRAM moves into host memory", by=OPTIONS)
    restore: float = setting(600.0, SECONDS, "it moves back", by=OPTIONS)
    unlock: float = setting(30.0, SECONDS, "processes may use the driver again", by=OPTIONS)
    data_path: Literal["fast", "plain"] = setting(
        "fast",
        _among("fast", "plain"),
        "whether VRAM bytes travel beside CRIU, by several threads, or through it",
        by=OPTIONS,
    )
    huge_pages: Literal["process", "node", "off"] = setting(
        "process",
        _among("process", "node", "off"),
        "whether VRAM moves into huge pages, which halves the time: of its process alone, or by the node's switch,"
        " which is `always` meanwhile, for all programs",
    )
    threads: int = setting(0, THREADS, "threads that move VRAM bytes", unset="one a processor, at most 16", by=OPTIONS)
    arena: NodeSizes = setting(
        (), NODE_SIZES, "pinned host memory of the node for VRAM that moves at the link's speed", unset="there is none"
    )
    arena_containers: Literal["annotated", "all"] = setting(
        "annotated",
        _among("annotated", "all"),
        'which containers with GPUs can use it: those with `kybernate.io/arena: "true"`, or all but `"false"`',
        since=CONTAINER,
    )
    arena_share: float = setting(
        1.0,
        SHARE,
        "part of the arena that one pod may have, or one container without a pod; what is more goes the driver's way",
    )
    image_pool: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "directory on the tmpfs of images that are kept in memory, with memory that is ready for them",
        unset="there is none",
    )
    image_pool_files: tuple[int, ...] = setting(
        (), SIZES, "what is kept ready there: one file for the VRAM of each process of such an image"
    )
    helper_idle: float = setting(900.0, SECONDS, "the node's CUDA helper ends after so long without a call")
    visible_devices_env: bool = setting(
        False,
        YES_OR_NO,
        "a restore believes NVIDIA_VISIBLE_DEVICES of a pod, which its author can set; false: only devices count that"
        " containerd has put into the container's configuration, as by CDI",
    )
    denied_drivers: tuple[str, ...] = setting(
        ("570.158.*", "595.*"), TEXTS, "driver versions whose checkpoints are refused; `*` stands for any text"
    )


@dataclass(frozen=True)
class Config:
    """All settings. `warnings` are sentences for the log about keys that had no effect."""

    runtime: str = setting(
        "",
        TEXT,
        "OCI runtime, as a path or as a name in PATH",
        by=OPTIONS,
        unset="by need: nvidia-container-runtime for GPUs, else runc",
        since=CONTAINER,
    )
    runtime_root: Path = setting(
        Path("/run/containerd/runc"),
        DIRECTORY,
        "where the OCI runtime keeps its state; the containerd namespace is appended",
        by=OPTIONS,
        since=CONTAINER,
    )
    systemd_cgroup: bool | None = setting(
        None,
        SWITCH,
        'whether systemd makes the cgroups; "auto" decides by the form of each container\'s cgroupsPath',
        by=OPTIONS,
        unset='"auto"',
        since=CONTAINER,
    )
    criu: Path | None = setting(None, CRIU, "CRIU's program", by=OPTIONS, unset="found in PATH", since=CONTAINER)
    criu_libdir: Path | None = setting(None, OPTIONAL_PATH, "CRIU's plugins", by=OPTIONS, unset="none are loaded")
    checkpoint_root: Path = setting(
        Path("/var/lib/kybernate/checkpoints"), DIRECTORY, "where relative names of checkpoint images are looked up"
    )
    trusted_roots: tuple[Path, ...] = setting(
        (),
        DIRECTORIES,
        "further directories from which pods may name images by path; root's own, writable by no other user",
    )
    restore_from_env: bool = setting(
        False, YES_OR_NO, "pods may name an image by the environment variable RESTORE_FROM, too"
    )
    hook_mounts: tuple[str, ...] = setting(
        HOOK_MOUNTS,
        TEXTS,
        "paths of the node that a restore may mount where the image says that a hook had mounted them; `*` stands for "
        "any text but /",
        unset="NVIDIA's driver files",
    )
    key_directory: Path = setting(
        Path("/var/lib/kybernate/keys"), DIRECTORY, "keys that sign and verify images; `node.key` is made at first use"
    )
    shared_key: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file with the key that signs images which move between nodes",
        unset="the node's own key signs",
    )
    work_root: Path = setting(
        Path("/var/lib/kybernate/work"), DIRECTORY, "scratch space and logs of checkpoints and restores"
    )
    log_file: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file for the daemons' logs, in addition to containerd's",
        unset="containerd's log alone",
        since=POD,
    )
    audit_log: Path | None = setting(
        Path("/var/log/kybernate/audit.jsonl"),
        OPTIONAL_PATH,
        "file with one line of JSON for each checkpoint, restore, suspend, resume and import, allowed or refused",
    )
    log_level: str = setting(
        "info", LEVEL, "the least severe message that is logged; containerd's -debug lowers it", since=POD
    )
    verify: bool = setting(
        True, YES_OR_NO, "compare every byte of an image with its digests before a restore", by=OPTIONS
    )
    annotations: tuple[str, ...] = setting(
        ("kybernate.io/*",),
        TEXTS,
        "annotations that pods may use; `*` stands for any text",
    )
    encryption_key: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file with the keys that encrypt checkpoint images: root's own, mode 0600, 64 hexadecimal digits a line",
        unset="images are not encrypted",
    )
    runtime_in_memory: bool = setting(
        True,
        YES_OR_NO,
        "the fork server keeps runc or crun, some 10 MiB, in sealed memory: they need not copy themselves for each "
        "container and exec",
        since=SERVER,
    )
    fork_server_idle: float = setting(
        900.0,
        SECONDS,
        "the node's fork server ends after so long without a start or a removal; 0: there is none",
        since=SERVER,
    )
    deadlines: Deadlines = table(Deadlines)
    gpu: Gpu = table(Gpu)
    warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path = DEFAULT_PATH) -> Config:
        """Read the node's file; without one, every setting has its default. Raises ConfigInvalid."""
        try:
            content = path.read_text()
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigInvalid(str(path), [f"cannot be read: {error}"]) from error
        return cls().merged(content, source=str(path), by=NODE)

    def merged(self, new: str | Mapping[str, Any], *, source: str = "runtime options", by: str = OPTIONS) -> Config:
        """Return these settings with those of `new`, TOML text or its parsed form, in their place.

        With `by=OPTIONS`, keys that only the node's file may set are left out with a warning. Raises ConfigInvalid.
        """
        if isinstance(new, str):
            import tomllib  # here, because the first container of a node waits for every import

            try:
                new = tomllib.loads(new)
            except tomllib.TOMLDecodeError as error:
                raise ConfigInvalid(source, [f"not TOML: {error}"]) from error
        reading = _Reading(source, by)
        result = reading.into(self, new)
        if reading.problems:
            raise ConfigInvalid(source, reading.problems)
        return replace(result, warnings=(*self.warnings, *reading.warnings))

    def replaced_by(self, new: Config) -> Config:
        """Return `new`, but for the settings that a container keeps for as long as it lives: these are as here."""
        return _keeping(self, new)

    def pod_may_use(self, annotation: str) -> bool:
        """Tell whether the annotation of that name counts when a pod carries it."""
        return any(fnmatchcase(annotation, pattern) for pattern in self.annotations)

    def pods_choice(self, annotations: Mapping[str, str], name: str) -> str:
        """Return the value of a pod's annotation, "" where there is none or where it does not count."""
        return annotations.get(name, "") if self.pod_may_use(name) else ""


T = TypeVar("T")


def _keeping(old: T, new: T) -> T:
    changes: dict[str, Any] = {}
    for key in _keys(type(old)):
        mine, other = getattr(old, key.name), getattr(new, key.name)
        if "table" in key.metadata:
            changes[key.name] = _keeping(mine, other)
        elif key.metadata["setting"].since != LIVE:
            changes[key.name] = mine
    return replace(new, **changes)  # type: ignore[type-var]  # T is always one of the dataclasses above


@dataclass
class _Reading:
    """One pass over a parsed TOML document, which collects what is wrong with it."""

    source: str
    by: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def into(self, old: T, values: Mapping[str, Any], prefix: str = "") -> T:
        """Return the dataclass `old` with `values` in it."""
        known = {key.name: key for key in _keys(type(old))}
        changes: dict[str, Any] = {}
        for name, value in values.items():
            key = prefix + name
            if name not in known:
                self.warnings.append(f"{self.source}: unknown key {key}{_nearest(name, known, prefix)}")
            elif "table" in known[name].metadata:
                self._table(changes, getattr(old, name), name, value, key)
            else:
                self._value(changes, known[name].metadata["setting"], name, value, key)
        return replace(old, **changes)  # type: ignore[type-var]  # T is always one of the dataclasses above

    def _table(self, changes: dict[str, Any], old: object, name: str, value: object, key: str) -> None:
        if isinstance(value, dict):
            changes[name] = self.into(old, value, f"{key}.")
        else:
            self.problems.append(f"{key} must be a table, not {_shown(value)}")

    def _value(self, changes: dict[str, Any], rule: Setting, name: str, value: object, key: str) -> None:
        if self.by == OPTIONS and rule.by == NODE:
            self.warnings.append(f"{self.source}: {key} has no effect here, only in {DEFAULT_PATH}")
            return
        try:
            changes[name] = rule.form.parse(value)
        except ValueError:
            self.problems.append(f"{key} must be {rule.form.words}, not {_shown(value)}")


def _keys(kind: type[Any]) -> list[Field[Any]]:
    return [key for key in fields(kind) if key.metadata]


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _nearest(name: str, known: Mapping[str, object], prefix: str) -> str:
    try:
        from difflib import get_close_matches  # only a misspelt file pays for it
    except ImportError:
        return ""  # a daemon may outlive the files of its interpreter
    near = get_close_matches(name, known, 1)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


@dataclass(frozen=True)
class Row:
    """One key as the manual's table shows it. `default` is what to write into the file to get the default."""

    key: str
    default: str
    form: str
    by: str
    since: str
    doc: str


def documented(kind: type[Any] = Config, prefix: str = "") -> Iterator[Row]:
    """Yield a row for every key, tables after the keys before them, in the order of declaration."""
    for key in _keys(kind):
        if "table" in key.metadata:
            yield from documented(key.metadata["table"], f"{prefix}{key.name}.")
            continue
        rule: Setting = key.metadata["setting"]
        default = rule.unset or f"`{_toml(key.default)}`"
        yield Row(prefix + key.name, default, rule.form.words, rule.by, rule.since, rule.doc)


def markdown_table() -> str:
    """Return the table of all keys for the manual."""
    lines = ["| key | default | value | changed by | in effect | meaning |", "|---|---|---|---|---|---|"]
    for row in documented():
        lines.append(f"| `{row.key}` | {row.default} | {row.form} | {row.by} | {row.since} | {row.doc} |")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else f'"{value}"'
