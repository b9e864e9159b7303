"""The privileges that a container's specification allows its processes, and what a process has beyond them.

The rule: a process may be in any state that an ordinary start with this specification could have brought it into. Its
author chooses the programs, so every state that some program could reach counts.

- The bounding set only shrinks, and no capability comes from outside of it or of the inheritable set.
- no_new_privs stays once it is set. Then a program gains nothing by execve(2): the permitted set is what init's own
  program begins with, which is the specification's for uid 0 and the ambient set for other users.
- Without no_new_privs a set-user-ID program may lie in the root filesystem, owned by any user: every id is reachable.
  With it, other ids need CAP_SETUID or CAP_SETGID.
- Filters of seccomp only accumulate: the oldest one of every thread is the one that the OCI runtime has installed.
- No process leaves a namespace or a cgroup of the container's for one of the node's.

Source: capabilities(7), prctl(2), seccomp(2), the OCI runtime specification's config.md and config-linux.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kybernate_shim.linux.credentials import (
    INFINITY,
    LIMITS,
    NO_LOGIN,
    SECCOMP_FILTER,
    Capabilities,
    ProcessCredentials,
    capability_bits,
)
from kybernate_shim.linux.thread_settings import ThreadSettings
from kybernate_shim.oci.spec import Spec

KEEP_CAPS: Final = 0x10  # the one of the securebits that any process may set
NAMES_SHOWN: Final = 6
ROOT: Final = 0
REAL_TIME_IO: Final = ("CAP_SYS_NICE", "CAP_SYS_ADMIN")


@dataclass(frozen=True)
class NeedsCapability:
    """Something in an image that only a process with one of these capabilities could have created."""

    what: str
    capabilities: tuple[str, ...]


@dataclass(frozen=True)
class Security:
    """What a checkpoint image says of its processes' privileges.

    `seccomp_profile` is the digest of the profile in the specification of the dumped container, "" where it had none;
    `label` is the name of its AppArmor profile or its SELinux label. Of a process's threads, those that differ from
    the first one are in `processes`.
    """

    seccomp_profile: str = ""
    label: str = ""
    processes: tuple[ProcessCredentials, ...] = ()


@dataclass(frozen=True)
class PrivilegeAllowance:
    """What a specification allows. `caps` are those that init gets; `limits` are hard ones by number.

    `namespaces` are the kinds of which the container has its own or its pod's. `login` and `boost` are
    those of the node's shims, with which every process begins.
    """

    uid: int = ROOT
    gid: int = ROOT
    groups: tuple[int, ...] = ()
    caps: Capabilities = field(default_factory=Capabilities)
    no_new_privs: bool = False
    seccomp_profile: str = ""
    label: str = ""
    namespaces: tuple[str, ...] = ()
    uid_map: tuple[str, ...] = ()
    gid_map: tuple[str, ...] = ()
    limits: Mapping[int, int] = field(default_factory=dict)
    login: int = NO_LOGIN
    boost: int = 0
    any_schedule: bool = False

    @property
    def permitted(self) -> int:
        """The capabilities that a process can come to have."""
        if not self.no_new_privs:
            return self.caps.bounding | self.caps.inheritable
        return self.caps.permitted | self.caps.ambient if self.uid == ROOT else self.caps.ambient

    @property
    def inheritable(self) -> int:
        """The capabilities that a process can put into its inheritable set."""
        return self.permitted | self.caps.inheritable

    @property
    def any_uid(self) -> bool:
        return not self.no_new_privs or self.has("CAP_SETUID")

    @property
    def any_gid(self) -> bool:
        return not self.no_new_privs or self.has("CAP_SETGID")

    def has(self, capability: str) -> bool:
        """Return whether a process can come to have the capability."""
        return bool(self.permitted >> capability_bits()[capability] & 1)


def allowance_of(
    spec: Spec, *, login: int = NO_LOGIN, boost: int = 0, nodes: Collection[str] = ()
) -> PrivilegeAllowance:
    """Return what a config.json allows. What it leaves open has the default of OCI runtimes: no capability, no filter.

    `login` and `boost` are those of a shim, as in Credentials. `nodes` are the kinds of namespaces that config.json
    names by a path that is the node's own, as it does for a pod in the node's network.
    """
    process, user = spec.process, spec.process.get("user") or {}
    return PrivilegeAllowance(
        uid=int(user.get("uid") or 0),
        gid=int(user.get("gid") or 0),
        groups=tuple(map(int, user.get("additionalGids") or ())),
        caps=_capabilities(process.get("capabilities") or {}),
        no_new_privs=process.get("noNewPrivileges") is True,
        seccomp_profile=seccomp_digest(spec),
        label=spec_label(spec),
        namespaces=tuple(
            kind for one in spec.linux.get("namespaces") or () if (kind := str(one.get("type"))) not in nodes
        ),
        uid_map=_id_map(spec.linux.get("uidMappings")),
        gid_map=_id_map(spec.linux.get("gidMappings")),
        limits=_limits(process.get("rlimits") or ()),
        login=login,
        boost=boost,
        any_schedule=bool(process.get("scheduler")),
    )


def seccomp_digest(spec: Spec) -> str:
    """Return a digest of the specification's seccomp profile, "" where it has none or one without any rule."""
    profile = spec.linux.get("seccomp") or {}
    if not profile.get("defaultAction") and not profile.get("syscalls"):
        return ""
    canonical = json.dumps(profile, sort_keys=True, separators=(",", ":")).encode()
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"


def spec_label(spec: Spec) -> str:
    """Return the name of the specification's AppArmor profile or its SELinux label, "" where it is not confined."""
    profile = str(spec.process.get("apparmorProfile") or "")
    return profile if profile not in ("", "unconfined") else str(spec.process.get("selinuxLabel") or "")


def security_of(spec: Spec, processes: Sequence[ProcessCredentials]) -> Security:
    """Return what an image's manifest keeps: of threads that equal the first one of their process, only the first."""
    kept: dict[int, ProcessCredentials] = {}
    others = []
    for one in processes:
        first = kept.setdefault(one.pid, one)
        if one is not first and _without_thread(one) != _without_thread(first):
            others.append(one)
    return Security(seccomp_digest(spec), spec_label(spec), (*kept.values(), *others))


def excess_of(
    image: Sequence[ProcessCredentials],
    held: Sequence[NeedsCapability],
    recorded: Security,
    allowance: PrivilegeAllowance,
) -> list[str]:
    """Return a sentence, with both values, for everything in an image's processes that is not allowed.

    `held` is what they hold open. `recorded` is from the image's manifest, which the node has signed: a filter's
    program does not show the profile from which the OCI runtime has made it.
    """
    found = [sentence for one in image for sentence in excess(_moved(one, allowance), allowance)]
    if allowance.seccomp_profile:
        if recorded.seccomp_profile != allowance.seccomp_profile:
            had = recorded.seccomp_profile or "none"
            found.append(f"seccomp: the profile of the image is {had}, the pod's is {allowance.seccomp_profile}")
        oldest = {one.filters[0] for one in image if one.filters}
        if len(oldest) > 1:
            found.append(f"seccomp: the oldest filters of the image's threads differ ({', '.join(sorted(oldest))}),"
                         " the pod's profile must be the oldest of all")  # fmt: skip
    for thing in held:
        if not any(map(allowance.has, thing.capabilities)):
            needs, allows = " or ".join(thing.capabilities), _capability_names(allowance.permitted)
            found.append(f"{thing.what} in the image needs {needs}, the pod allows {allows}")
    return list(dict.fromkeys(found))


def excess_of_settings(threads: Iterable[ThreadSettings], allowance: PrivilegeAllowance) -> list[str]:
    """Return a sentence for each thread of an image that has a setting that a process of the pod could not choose."""
    if allowance.any_schedule or any(map(allowance.has, REAL_TIME_IO)):
        return []
    return [f"{one.title}: a real-time I/O priority, the pod allows ordinary ones without CAP_SYS_NICE"
            for one in threads if one.wants_real_time_io]  # fmt: skip


def _moved(one: ProcessCredentials, allowance: PrivilegeAllowance) -> ProcessCredentials:
    """Return a thread of an image with the pod's ranges of ids where those of the image differ only on the node's side.

    Each pod with ids of its own has another range of the node's; inside the pod, the ids are the same.
    """
    alike = all(
        [_inside(text) for text in found] == [_inside(text) for text in allowed]
        for found, allowed in ((one.uid_map, allowance.uid_map), (one.gid_map, allowance.gid_map))
    )
    return replace(one, uid_map=allowance.uid_map, gid_map=allowance.gid_map) if alike else one


def _inside(text: str) -> tuple[str, str]:
    """Return the first id of a range inside the namespace, and their count."""
    first, _, count = text.split()
    return first, count


def excess(one: ProcessCredentials, allowance: PrivilegeAllowance) -> list[str]:
    """Return a sentence, with both values, for everything that a thread has beyond what is allowed."""
    title = (
        f"process {one.pid} ({one.name})"
        if one.tid == one.pid
        else f"thread {one.tid} of process {one.pid} ({one.name})"
    )
    findings = (
        *_ids(one, allowance),
        *_capability_sets(one, allowance),
        *_confinement(one, allowance),
        *_places(one, allowance),
        *_resources(one, allowance),
    )
    return [f"{title}: {text}" for text in findings]


def _ids(one: ProcessCredentials, allowance: PrivilegeAllowance) -> Iterable[str]:
    if not allowance.any_uid:
        yield from _only("uid", one.uids, {allowance.uid})
    if not allowance.any_gid:
        yield from _only("gid", (*one.gids, *one.groups), {allowance.gid, *allowance.groups})


def _only(what: str, found: Iterable[int], allowed: set[int]) -> Iterable[str]:
    if others := sorted(set(found) - allowed):
        yield f"{what} {_listed(others)}, the pod allows {_listed(sorted(allowed))} only"


def _capability_sets(one: ProcessCredentials, allowance: PrivilegeAllowance) -> Iterable[str]:
    rules = (
        ("bounding", one.caps.bounding, allowance.caps.bounding),
        ("permitted", one.caps.permitted, allowance.permitted),
        ("effective", one.caps.effective, allowance.permitted),
        ("inheritable", one.caps.inheritable, allowance.inheritable),
        ("ambient", one.caps.ambient, allowance.permitted),
    )
    alike: dict[tuple[int, int], list[str]] = {}
    for name, found, allowed in rules:
        if beyond := found & ~allowed:
            alike.setdefault((beyond, allowed), []).append(name)
    for (beyond, allowed), names in alike.items():
        sets = " and ".join(names)
        yield f"{sets} capabilities {_capability_names(beyond)}, the pod allows {_capability_names(allowed)}"
    if one.securebits & ~KEEP_CAPS and not allowance.has("CAP_SETPCAP"):
        yield f"securebits {one.securebits:#x}, the pod allows 0x0 and {KEEP_CAPS:#x} without CAP_SETPCAP"


def _confinement(one: ProcessCredentials, allowance: PrivilegeAllowance) -> Iterable[str]:
    if allowance.no_new_privs and not one.no_new_privs:
        yield "no_new_privs is not set, the pod sets it"
    if allowance.seccomp_profile and (one.seccomp != SECCOMP_FILTER or not one.filters):
        yield f"seccomp mode {one.seccomp} with {len(one.filters)} filters, the pod's profile is mode 2 with one"
    if allowance.label and one.label != allowance.label and not one.label.startswith(f"{allowance.label}//"):
        yield f"security label {one.label or 'unconfined'}, the pod's is {allowance.label}"


def _places(one: ProcessCredentials, allowance: PrivilegeAllowance) -> Iterable[str]:
    for kind in allowance.namespaces:
        if kind in one.node_namespaces:
            yield f"{kind} namespace of the node, the pod has its own"
    found, allowed = (one.uid_map, one.gid_map), (allowance.uid_map, allowance.gid_map)
    if ("user" in allowance.namespaces or found != ((), ())) and found != allowed:
        yield f"ids of its user namespace {_maps(found)}, the pod's are {_maps(allowed)}"
    if one.stray_cgroup:
        yield f"cgroup {one.stray_cgroup}, the pod allows the container's own and those below it"


def _resources(one: ProcessCredentials, allowance: PrivilegeAllowance) -> Iterable[str]:
    names = LIMITS.split()
    if not allowance.has("CAP_SYS_RESOURCE"):
        for number, hard in enumerate(one.limits):
            if hard > allowance.limits.get(number, INFINITY):
                yield f"RLIMIT_{names[number]} {_limit(hard)}, the pod allows {_limit(allowance.limits[number])}"
    if one.login not in (NO_LOGIN, allowance.login):
        yield f"login uid {one.login}, the pod's is {'not set' if allowance.login == NO_LOGIN else allowance.login}"
    if not allowance.any_schedule and not allowance.has("CAP_SYS_NICE"):
        if one.real_time:
            yield "a real-time scheduling policy, the pod allows ordinary ones without CAP_SYS_NICE"
        if one.boost > allowance.boost:
            yield f"nice value {-one.boost}, the pod allows {-allowance.boost} and more without CAP_SYS_NICE"


def _without_thread(one: ProcessCredentials) -> dict[str, Any]:
    return {name: value for name, value in vars(one).items() if name not in ("tid", "name")}


def _capabilities(sets: Mapping[str, Sequence[str]]) -> Capabilities:
    return Capabilities(**{name: _bits(sets.get(name) or ()) for name in vars(Capabilities())})


def _bits(names: Iterable[str]) -> int:
    """Return the bits of capabilities; a name that no kernel knows grants nothing, as in runtimes."""
    known = capability_bits()
    return sum({1 << known[name.upper()] for name in names if name.upper() in known})


def _capability_names(bits: int) -> str:
    names = [name for name, number in capability_bits().items() if bits >> number & 1]
    if unnamed := bits & ~((1 << len(capability_bits())) - 1):
        names.append(f"{unnamed:#x}")
    return _listed(names) if names else "none"


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:NAMES_SHOWN]))
    return f"{shown} and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else shown


def _id_map(ranges: Sequence[Mapping[str, int]] | None) -> tuple[str, ...]:
    return tuple(f"{one.get('containerID', 0)} {one.get('hostID', 0)} {one.get('size', 0)}" for one in ranges or ())


def _maps(maps: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    kinds = zip(("uids", "gids"), maps, strict=True)
    return "; ".join(f"{kind} {', '.join(found)}" for kind, found in kinds if found) or "are the node's"


def _limits(limits: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    numbers = {f"RLIMIT_{name}": number for number, name in enumerate(LIMITS.split())}
    known = ((numbers.get(str(one.get("type"))), one.get("hard")) for one in limits)
    return {number: int(hard or 0) for number, hard in known if number is not None}


def _limit(value: int) -> str:
    return "unlimited" if value == INFINITY else str(value)
