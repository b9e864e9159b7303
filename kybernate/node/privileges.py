"""What a checkpoint image asks for: privileges, mounts of the node, devices and hooks, for the decision to import it.

It is read from `kybernate-spec.json`, the OCI configuration of the container that was dumped, and from the manifest.
Nothing here decides; an administrator does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kybernate.node.failure import Invalid
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.mounts.configured import is_bind
from kybernate_shim.oci.spec import EARLY_HOOKS, Spec

OWN_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
HOOK_STAGES = (*EARLY_HOOKS, "startContainer", "poststart", "poststop")
POWERFUL = ("CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_NET_ADMIN", "CAP_BPF",
            "CAP_DAC_READ_SEARCH", "CAP_SYS_BOOT", "CAP_MAC_ADMIN")  # fmt: skip
SHOWN = 12  # items of a list in a message
NOTHING = "none"
CAPABILITY_SETS = ("bounding", "effective", "permitted", "inheritable", "ambient")


@dataclass(frozen=True)
class HostMount:
    """A path of the node that the container has. `kind`: `bind` of the configuration, `hook` of the manifest alone."""

    destination: str
    source: str
    kind: str
    writable: bool


@dataclass(frozen=True)
class SpecPrivileges:
    """What the configuration of a container gives it; empty words where it says nothing.

    `warnings` are short sentences about what an ordinary container does not have.
    """

    user: str
    capabilities: tuple[str, ...]
    no_new_privs: bool
    seccomp: str
    confinement: str
    devices: tuple[str, ...]
    hooks: tuple[str, ...]
    mounts: tuple[HostMount, ...]
    warnings: tuple[str, ...]


def privileges_of(document: Mapping[str, Any], manifest: Manifest) -> SpecPrivileges:
    """Return what the OCI configuration `document` and the manifest ask for. Raises Invalid for values of odd types."""
    try:
        return _privileges(Spec(document), manifest)
    except (AttributeError, TypeError, ValueError) as error:
        raise Invalid(f"the configuration of the container is not one of OCI: {error}") from error


def requests_of(asks: SpecPrivileges) -> dict[str, str]:
    """Return what the configuration asks for, each in one line."""
    return {
        "user": asks.user,
        "capabilities": _listed(asks.capabilities),
        "no_new_privs": "yes" if asks.no_new_privs else "no",
        "seccomp": asks.seccomp or NOTHING,
        "AppArmor or SELinux": asks.confinement or NOTHING,
        "devices": _listed(asks.devices),
        **({"unusual": "; ".join(asks.warnings)} if asks.warnings else {}),
    }


def in_lines(asks: SpecPrivileges) -> list[str]:
    """Return the same for a message, with the paths of the node."""
    lines = [f"  {name}: {value}" for name, value in requests_of(asks).items()]
    lines += [f"  mount of the node: {mount.source} at {mount.destination}" for mount in asks.mounts[:SHOWN]]
    if len(asks.mounts) > SHOWN:
        lines.append(f"  … and {len(asks.mounts) - SHOWN} more mounts")
    return lines


def _listed(items: tuple[str, ...]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{', '.join(items[:SHOWN])}{more}" if items else NOTHING


def process_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    """Return pid, name, uids, effective capabilities (hexadecimal), no_new_privs and seccomp mode of each process.

    They are there in images of releases that record them (`security`).
    """
    security = getattr(manifest, "security", None)  # a field that a manifest may not have
    rows: list[tuple[str, ...]] = []
    for one in getattr(security, "processes", ()):
        uids = ",".join(map(str, dict.fromkeys(one.uids)))
        rows.append(
            (str(one.pid), one.name, uids, f"{one.caps.effective:#x}", _yes(one.no_new_privs), str(one.seccomp))
        )
    return rows


def _privileges(spec: Spec, manifest: Manifest) -> SpecPrivileges:
    capabilities = _capabilities(spec)
    seccomp = spec.linux.get("seccomp") or {}
    label = str(spec.process.get("apparmorProfile") or spec.process.get("selinuxLabel") or "")
    return SpecPrivileges(
        user=_user(spec),
        capabilities=capabilities,
        no_new_privs=spec.process.get("noNewPrivileges") is True,
        seccomp=f"a profile with {len(seccomp.get('syscalls') or ())} rules" if seccomp.get("defaultAction") else "",
        confinement="" if label == "unconfined" else label,
        devices=tuple(path for path in spec.devices if path),
        hooks=tuple(_hooks(spec)),
        mounts=tuple(_mounts(spec, manifest)),
        warnings=tuple(_warnings(spec, capabilities)),
    )


def _user(spec: Spec) -> str:
    user = spec.process.get("user") or {}
    groups = ", ".join(str(gid) for gid in user.get("additionalGids") or ())
    mapped = " in a user namespace" if spec.namespace_path("user") is not None else ""
    return f"uid {user.get('uid', 0)}, gid {user.get('gid', 0)}{f', groups {groups}' if groups else ''}{mapped}"


def _capabilities(spec: Spec) -> tuple[str, ...]:
    sets = spec.process.get("capabilities") or {}
    return tuple(sorted({str(name) for kind in CAPABILITY_SETS for name in sets.get(kind) or ()}))


def _hooks(spec: Spec) -> Iterator[str]:
    for stage in HOOK_STAGES:
        for hook in (spec.document.get("hooks") or {}).get(stage) or ():
            yield f"{stage}: {' '.join([str(hook.get('path')), *map(str, (hook.get('args') or ())[1:])])}"


def _mounts(spec: Spec, manifest: Manifest) -> Iterator[HostMount]:
    listed = set()
    for mount in spec.mounts:
        if is_bind(mount):
            options: Sequence[str] = mount.get("options") or ()
            destination = str(mount.get("destination"))
            listed.add(destination)
            yield HostMount(destination, str(mount.get("source") or ""), "bind", not {"ro", "rro"} & set(options))
    for recorded in manifest.mounts:
        if recorded.source and recorded.destination not in listed:
            yield HostMount(recorded.destination, recorded.source, recorded.kind, "ro" not in recorded.options)


def _warnings(spec: Spec, capabilities: Sequence[str]) -> Iterator[str]:
    if powerful := [name for name in capabilities if name in POWERFUL]:
        yield f"capabilities with power over the node: {', '.join(powerful)}"
    if shared := [kind for kind in OWN_NAMESPACES if spec.namespace_path(kind) is None]:
        yield f"namespaces of the node: {', '.join(shared)}"
    rules = (spec.linux.get("resources") or {}).get("devices") or ()
    if any(rule.get("allow") and rule.get("type", "a") in ("a", "") and rule.get("major") is None for rule in rules):
        yield "every device of the node"
    if not (spec.linux.get("seccomp") or {}).get("defaultAction"):
        yield "no seccomp profile"
    if not spec.linux.get("maskedPaths"):
        yield "no masked paths: it sees all of /proc and /sys"
    if any(_hooks(spec)):
        yield "hooks: programs of the node that run as root"
    if any(not is_bind(mount) and "rw" in (mount.get("options") or ()) and mount.get("type") == "sysfs"
           for mount in spec.mounts):  # fmt: skip
        yield "a writable /sys"


def _yes(value: object) -> str:
    return "yes" if value else "no"
