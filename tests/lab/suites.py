"""The Debian suites that a node's root is made of, and the packages that all roots have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """A Debian suite. `rolling`: it changes daily; its index is valid for a week, which a frozen mirror outlives."""

    name: str
    rolling: bool


TRIXIE, SID = Suite("trixie", rolling=False), Suite("sid", rolling=True)


PACKAGES = (
    "containerd", "runc", "crun", "criu", "containernetworking-plugins", "docker-registry",
    "iproute2", "iptables", "nftables",  # CRIU locks a network with one of the last two
    "busybox-static", "catatonit",  # the images' content
    "ca-certificates", "e2fsprogs", "procps", "strace", "util-linux", "zstd",
    "python3", "python3-venv",
    "postgresql",  # a cluster's registry
    "systemd",  # the service manager of the packaged units
    "fio",  # the measure of a disk
    "gcc", "libc6-dev",  # tests compile libraries that stand in for the driver's
)  # fmt: skip
