"""What CRIU needs to restore into a user namespace that is there already, a pod's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.criu import user_namespace
from kybernate_shim.checkpoint.mounts.reachable import ReachableSources
from kybernate_shim.errors import Refused
from kybernate_shim.oci.spec import Spec

RANGE = [{"containerID": 0, "hostID": 200_000, "size": 65536}]


def spec(path: str | None, *mounts: dict[str, Any]) -> Spec:
    namespaces = [] if path is None else [{"type": "user", **({"path": path} if path else {})}]
    return Spec({"mounts": list(mounts), "linux": {"namespaces": namespaces, "gidMappings": RANGE}})


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(user_namespace, "LIBRARY", tmp_path / "library.so")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path / "library.so"


@pytest.mark.parametrize("path", [None, ""])
def test_container_without_a_shared_namespace_needs_no_library(library: Path, path: str | None) -> None:
    assert not library.exists()
    assert user_namespace.joined_environment(spec(path)) == {}


def test_library_is_preloaded_before_what_the_node_preloads(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.touch()
    expected = {"KYBERNATE_USER_NAMESPACE": "/proc/7/ns/user", "LD_PRELOAD": str(library)}
    assert user_namespace.joined_environment(spec("/proc/7/ns/user")) == expected
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    found = user_namespace.joined_environment(spec("/proc/7/ns/user"))["LD_PRELOAD"]
    assert found == f"{library}:/usr/lib/other.so"


def test_installation_without_the_library_is_named(library: Path) -> None:
    with pytest.raises(Refused, match=r"library\.so is not there.*C compiler. Nothing was changed"):
        user_namespace.joined_environment(spec("/proc/7/ns/user"))


def test_sources_are_mounted_where_the_namespaces_root_may_look() -> None:
    volume = {"source": "/var/lib/kubelet/x", "uidMappings": RANGE, "gidMappings": RANGE}
    sources = {"/data": "/var/lib/kubelet/x", "/etc/hosts": "/var/lib/hosts"}
    found = ReachableSources.of(spec("/proc/7/ns/user", volume), Path("/work/default.c.restore"), sources)
    assert found.group == 200_000
    assert [one.users for one in found.sources] == ["0:200000:65536", ""]
    place = "/run/kybernate-sources/default.c.restore"
    assert found.lines == (f"external mnt[/data]:{place}/0", f"external mnt[/etc/hosts]:{place}/1")


def test_container_without_a_user_namespace_has_its_sources_where_they_are() -> None:
    assert ReachableSources.of(spec(None), Path("/work"), {"/data": "/elsewhere"}).lines == ()
