"""What distinguishes one lane of the lab from another, and what all of them hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    """A Debian suite, and the form of configuration that its containerd wants.

    `rolling`: the suite changes daily; its index is valid for a week, which a mirror that is frozen outlives.
    """

    name: str
    config_version: int
    rolling: bool


LANES = {
    "trixie": Lane("trixie", config_version=2, rolling=False),
    "sid": Lane("sid", config_version=3, rolling=True),
}

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
