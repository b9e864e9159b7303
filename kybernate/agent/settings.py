"""The agent's settings: `/etc/kybernate/agent.toml`, each one line of a dataclass, as the shim's are.

What concerns the shims as well, such as where images and keys lie, is in `shim.toml`, which the agent reads, too.
"""

# ruff: noqa: RUF009  (settings are dataclass fields; their declarations only call dataclasses.field)
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kybernate.agent import seat_settings, tier_settings
from kybernate.agent.seat_settings import Seats
from kybernate.agent.tier_settings import NUMBER, Tiers
from kybernate_shim.config import ConfigInvalid
from kybernate_shim.config.declaring import LIVE, RESTART, keys, setting, table
from kybernate_shim.config.forms import (
    ADDRESSES,
    BYTES,
    COUNT,
    DIRECTORY,
    LEVEL,
    LISTEN,
    OPTIONAL_PATH,
    SECONDS,
    TEXT,
    TEXTS,
    YES_OR_NO,
    Addresses,
)
from kybernate_shim.config.reading import keeping, read_file

DEFAULT_PATH: Final = Path("/etc/kybernate/agent.toml")


@dataclass(frozen=True)
class Tls:
    """The TCP listener. A certificate's role is that of the first list with one of its names (SAN: URI or DNS)."""

    listen: str = setting("", LISTEN, "address for clients with certificates", unset="none", since=RESTART)
    certificate: Path | None = setting(
        None, OPTIONAL_PATH, "file with the agent's certificate, and the chain to its CA, as PEM", unset="none"
    )
    key: Path | None = setting(None, OPTIONAL_PATH, "file with its key: root's own, mode 0600", unset="none")
    client_ca: Path | None = setting(
        None, OPTIONAL_PATH, "file with the CAs whose clients are accepted, as PEM", unset="none"
    )
    operators: tuple[str, ...] = setting(
        (), TEXTS, "names of clients that may do everything; `*` is any text between dots, or slashes"
    )
    readers: tuple[str, ...] = setting((), TEXTS, "names of clients with read-only access")
    proxies: tuple[str, ...] = setting(
        (), TEXTS, "names of clients that may read, wake, put to sleep, and report activity"
    )
    peers: tuple[str, ...] = setting((), TEXTS, "names of agents of other nodes, that may read images")


@dataclass(frozen=True)
class Peers:
    """Images from and for the agents of other nodes. The agent's own certificate is the one of `tls`."""

    addresses: Addresses = setting((), ADDRESSES, "of agents, by the names of their nodes", unset="NODE:7443")
    ca: Path | None = setting(
        None, OPTIONAL_PATH, "file with the CAs of the agents' certificates, as PEM", unset="the one of `tls.client_ca`"
    )
    reads: int = setting(16, COUNT, "of other agents that are answered concurrently; more of them wait", since=RESTART)
    bytes_per_second: int = setting(0, BYTES, "that this agent sends to all others together", unset="no limit")


@dataclass(frozen=True)
class SelfSocket:
    """The restricted socket, for processes in containers: each call is about the caller's own container."""

    enabled: bool = setting(False, YES_OR_NO, "whether there is one", since=RESTART)
    path: Path = setting(
        Path("/run/kybernate/self/agent.sock"),
        DIRECTORY,
        "its directory is what containers mount",
        since=RESTART,
    )
    tenants: bool = setting(False, YES_OR_NO, "whether containers of pods may use it; false: those of root alone")
    calls_per_minute: int = setting(240, COUNT, "of one container; what is more is refused")
    quota: int = setting(
        64 << 30, BYTES, "room for the images that containers of one namespace have asked for", unset='`"64GiB"`'
    )


@dataclass(frozen=True)
class Kubernetes:
    """The cluster whose pods run on the node: what appears on them, and what their annotations may ask for."""

    kubeconfig: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file that says how the API server is called",
        unset="the service account of the agent's own pod, if it runs in one; else no access",
        since=RESTART,
    )
    node: str = setting(
        "", TEXT, "the node's name in the cluster", unset="the variable `NODE_NAME`, else `node_name`", since=RESTART
    )
    checkpoints: bool = setting(
        True, YES_OR_NO, "whether the annotation `kybernate.io/checkpoint` of a pod is acted on"
    )
    quota: int = setting(
        64 << 30, BYTES, "room for a namespace's images, if one of its pods asks for another", unset='`"64GiB"`'
    )


@dataclass(frozen=True)
class OperationLimits:
    """How much the agent does concurrently."""

    running: int = setting(64, COUNT, "operations of the node")
    per_gpu: int = setting(2, COUNT, "operations that copy from or to one GPU")
    per_disk: int = setting(2, COUNT, "operations that write to or read from one disk")
    deadline: float = setting(3600.0, SECONDS, "of an operation whose request has none; 0: none")
    drain: float = setting(20.0, SECONDS, "the agent waits for operations when it is stopped; they continue without it")


@dataclass(frozen=True)
class Webhook:
    """Events for people without Kubernetes."""

    urls: tuple[str, ...] = setting((), TEXTS, "each event is posted to these as JSON")
    key: Path | None = setting(
        None, OPTIONAL_PATH, "file with the secret of the signature (HMAC-SHA-256)", unset="events are not signed"
    )
    level: str = setting("info", LEVEL, "the least severe event that is posted")
    types: tuple[str, ...] = setting(
        (), TEXTS, "types of the events that are posted, such as `operation.*`; `*` stands for any text", unset="all"
    )


@dataclass(frozen=True)
class Metrics:
    """Prometheus."""

    listen: str = setting("", LISTEN, "address for Prometheus (HTTP), open to all", unset="none", since=RESTART)


@dataclass(frozen=True)
class Tracing:
    """OpenTelemetry."""

    endpoint: str = setting(
        "", TEXT, "OTLP collector (gRPC), such as `http://localhost:4317`", unset="no traces", since=RESTART
    )


@dataclass(frozen=True)
class StoreSettings:
    """The store of checkpoint images. Its credentials are the environment's, as the provider's own tools take them."""

    url: str = setting(
        "", TEXT, "its place: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///DIRECTORY`", unset="none"
    )
    endpoint: str = setting("", TEXT, "URL of a service other than the provider's own", unset="the provider's")
    region: str = setting("", TEXT, "region of the bucket", unset="us-east-1")
    ca: Path | None = setting(
        None, OPTIONAL_PATH, "file with the CAs of the service's certificate, as PEM", unset="the system's alone"
    )
    key: Path = setting(
        Path("/var/lib/kybernate/store/key"), DIRECTORY, "file with the store's key, the same on all its nodes"
    )
    encrypted: bool = setting(False, YES_OR_NO, "whether chunks and recipes are encrypted; decided by `store init`")
    level: int = setting(
        0,
        NUMBER,
        "of zstd, 0: 1 to 6 by the speed of the connection; chunks that do not become smaller are stored as they are",
    )
    parallel: int = setting(4, COUNT, "requests of one transfer")
    bytes_per_second: int = setting(0, BYTES, "of one transfer", unset="no limit")
    look_seconds: float = setting(300, SECONDS, "between two looks at which images other nodes have put there")

    @property
    def compression(self) -> int | None:
        """The level as a transfer has it: None goes by the speed of the connection."""
        return self.level or None


@dataclass(frozen=True)
class Settings:
    """All settings. `warnings` are sentences for the log about keys that had no effect."""

    containerd: Path = setting(Path("/run/containerd/containerd.sock"), DIRECTORY, "containerd's socket", since=RESTART)
    state_directory: Path = setting(
        Path("/var/lib/kybernate/agent"), DIRECTORY, "the journal: a directory of root's own", since=RESTART
    )
    socket: Path = setting(
        Path("/run/kybernate/agent.sock"), DIRECTORY, "the agent's socket: for root, and for readers", since=RESTART
    )
    reader_group: str = setting(
        "kybernate", TEXT, "group of the node whose members have read-only access", since=RESTART
    )
    connections: int = setting(64, COUNT, "of one user, container or certificate; what is more is refused")
    log_level: str = setting("info", LEVEL, "the least severe message that is logged", since=RESTART)
    registry: str = setting(
        "",
        TEXT,
        "URL of the registry's database, such as `postgresql+psycopg://…`",
        unset="a file, `/var/lib/kybernate/registry.db`",
        since=RESTART,
    )
    node_name: str = setting("", TEXT, "the node's name in registry and metrics", unset="its host name", since=RESTART)
    operations: OperationLimits = table(OperationLimits)
    self_socket: SelfSocket = table(SelfSocket)
    kubernetes: Kubernetes = table(Kubernetes)
    tls: Tls = table(Tls)
    peers: Peers = table(Peers)
    webhooks: Webhook = table(Webhook)
    metrics: Metrics = table(Metrics)
    tracing: Tracing = table(Tracing)
    store: StoreSettings = table(StoreSettings)
    tiers: Tiers = table(Tiers)
    seats: Seats = table(Seats)
    warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path = DEFAULT_PATH) -> Settings:
        """Read the file; without one, every setting has its default. Raises ConfigInvalid."""
        found, warnings = read_file(cls(), path)
        if problems := list(_contradictions(found)):
            raise ConfigInvalid(str(path), problems)
        return replace(found, warnings=warnings)


@dataclass
class LiveSettings:
    """The settings in use. `problem` says why the file is not, `pending` which keys wait for the next start."""

    path: Path
    current: Settings
    problem: str = ""
    pending: tuple[str, ...] = field(default=())

    @classmethod
    def load(cls, path: Path = DEFAULT_PATH) -> LiveSettings:
        """Read the file for the first time. Raises ConfigInvalid."""
        return cls(path, Settings.load(path))

    def reload(self) -> None:
        """Read the file again. One that cannot be used changes nothing but `problem`."""
        try:
            found = Settings.load(self.path)
        except ConfigInvalid as error:
            self.problem = str(error)
            return
        self.problem, self.pending = "", tuple(_kept(self.current, found))
        self.current = replace(keeping(self.current, found), warnings=found.warnings)


def _kept(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys that differ and are in effect from the next start on."""
    for key in keys(type(old)):
        mine, other = getattr(old, key.name), getattr(new, key.name)
        if "table" in key.metadata:
            yield from _kept(mine, other, f"{prefix}{key.name}.")
        elif mine != other and key.metadata["setting"].since != LIVE:
            yield prefix + key.name


def _contradictions(found: Settings) -> Iterator[str]:
    if found.tls.listen:
        for name in ("certificate", "key", "client_ca"):
            if getattr(found.tls, name) is None:
                yield f"tls.{name} must be set where tls.listen is"
    for url in found.webhooks.urls:
        if not url.startswith(("https://", "http://")):
            yield f"webhooks.urls must be a list of URLs of HTTP, not {url!r}"
    yield from tier_settings.contradictions(found.tiers)
    yield from seat_settings.contradictions(found.seats)
