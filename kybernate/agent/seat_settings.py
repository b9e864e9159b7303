"""The settings of seats: `[seats]` of `agent.toml`, and the document of profiles, groups and rules that they name."""

# ruff: noqa: RUF009  (settings are dataclass fields; their declarations only call dataclasses.field)
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kybernate.agent.tier_rules import zone_of
from kybernate.seats.configuration import MOST_BYTES, Configuration, SeatsInvalid, read_document, read_yaml
from kybernate_shim.config.declaring import RESTART, setting
from kybernate_shim.config.forms import DIRECTORY, OPTIONAL_PATH, SettingForm, among


def _document(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


DOCUMENT: Final = SettingForm("a table with the keys of the file", _document)


@dataclass(frozen=True)
class Seats:
    """Seats on the node's GPUs. Without a file or a table, there are none."""

    file: Path | None = setting(
        None, OPTIONAL_PATH, "YAML file with profiles, groups and rules", unset="none", since=RESTART
    )
    configuration: Mapping[str, Any] | None = setting(
        None, DOCUMENT, "the same keys as a table, in place of the file", unset="none", since=RESTART
    )
    device_plugins: Path = setting(
        Path("/var/lib/kubelet/device-plugins"), DIRECTORY, "kubelet's directory for device plugins", since=RESTART
    )
    pod_resources: Path = setting(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"), DIRECTORY, "kubelet's PodResources socket", since=RESTART
    )
    devices: str = setting(
        "nodes", among("nodes", "cdi"), "how a container gets its GPUs: device nodes, or names of CDI", since=RESTART
    )


def configuration_of(settings: Seats) -> Configuration | None:
    """Return the configuration that the settings name, None where they name none. Raises SeatsInvalid."""
    zone = zone_of("")
    if settings.configuration:
        return read_document(settings.configuration, "seats.configuration", zone=zone)
    return read_file(settings.file, zone) if settings.file else None


def read_file(path: Path, zone: Any) -> Configuration:
    """Return the configuration of a file. Raises SeatsInvalid."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise SeatsInvalid(str(path), [f"cannot be read: {error}"]) from error
    return read_yaml(text, str(path), zone)


def contradictions(found: Seats) -> Iterator[str]:
    """Yield what is wrong with `seats.configuration`; a file is read by the agent's start."""
    if found.configuration and found.file:
        yield "seats.file and seats.configuration must not both be set"
    if found.configuration:
        try:
            read_document(found.configuration, "seats.configuration")
        except SeatsInvalid as error:
            yield from (f"seats.configuration: {problem}" for problem in error.problems)
