"""What a requester may do: one rule for each right, one function that applies it, one table in the documentation.

A rule is a constant, except where the node's configuration may widen it for tenants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kybernate_shim.config import Config
from kybernate_shim.trust.requester import Requester


class Right(Enum):
    """Something that may be requested of a restore or a checkpoint."""

    ANY_PATH = "name an image by any path"
    ENVIRONMENT = "name an image by `RESTORE_FROM`"
    ANY_NAMESPACE = "restore an image of another namespace"
    UNSIGNED = "restore an image without a valid signature"
    EXCESS = "restore processes with more privileges than the new container's configuration allows"
    UNKNOWN_MOUNTS = "restore kernel filesystems that the new container's configuration does not mount"
    CRIU_OPTIONS = "name a file with options for CRIU"
    SKIP_VERIFY = "restore without comparing digests (`verify = false`)"
    VISIBLE_DEVICES = "choose GPUs of a restore by `NVIDIA_VISIBLE_DEVICES`"


@dataclass(frozen=True)
class Rule:
    """Who has a right. `tenant` and `node` are words for the table; `allows` decides for a tenant."""

    tenant: str
    node: str
    allows: Callable[[Config], bool]


def _never(config: Config) -> bool:
    return False


# What applies to root's containers as well as to a tenant's: the environment may be that of a container image.
FOR_ALL = frozenset({Right.ENVIRONMENT})
RULES: dict[Right, Rule] = {
    Right.ANY_PATH: Rule(
        "no: a name below `checkpoint_root/<namespace of the pod>`, or a path below one of `trusted_roots`",
        "yes",
        _never,
    ),
    Right.ENVIRONMENT: Rule(
        "only with `restore_from_env = true`; else the variable is ignored, with a warning in the log",
        "the same, because a container image brings environment variables along",
        lambda config: config.restore_from_env,
    ),
    Right.ANY_NAMESPACE: Rule("no: the manifest names the pod's own namespace", "yes", _never),
    Right.UNSIGNED: Rule(
        "no", "yes, with a warning in the log; `kybernate restore` refuses it until `kybernate import`", _never
    ),
    Right.EXCESS: Rule("no", "yes", _never),
    Right.UNKNOWN_MOUNTS: Rule("no", "yes", _never),
    Right.CRIU_OPTIONS: Rule(
        "no: the annotation is replaced, the node's own file alone counts", "yes, options of the allow-list", _never
    ),
    Right.SKIP_VERIFY: Rule("no", "yes", _never),
    Right.VISIBLE_DEVICES: Rule(
        "only with `gpu.visible_devices_env = true`; else the devices in the container's configuration decide",
        "yes",
        lambda config: config.gpu.visible_devices_env,
    ),
}


def may(requester: Requester, right: Right, config: Config) -> bool:
    """Return whether the requester has the right on a node with this configuration."""
    return (not requester.is_tenant and right not in FOR_ALL) or RULES[right].allows(config)


def markdown_table() -> str:
    """Return the table of all rights for the documentation."""
    lines = [
        "| may | a tenant: containers that come through CRI | the node's root: `ctr`, `kybernate` |",
        "|---|---|---|",
    ]
    lines += [f"| {right.value} | {rule.tenant} | {rule.node} |" for right, rule in RULES.items()]
    return "\n".join(lines) + "\n"
