"""Which files of containerd's configuration change, and that all else in them stays."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kybernate.install.containerd_config import (
    Files,
    changes,
    difference,
    handler,
    imported,
    strayed,
)
from kybernate.node.failure import Failure

MAIN = Path("/etc/containerd/config.toml")
DROP_IN = Path("/etc/containerd/conf.d/kybernate.toml")
OTHER = Path("/etc/containerd/conf.d/99-nvidia.toml")
SHIM = "/usr/local/bin/containerd-shim-kybernate-v1"
PACKAGING = Path(__file__).parents[3] / "packaging" / "containerd"
OF_DEBIAN = """version = 2

# the administrator's own words
[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
"""
OF_VERSION_3 = '# first\nversion = 3\n\n[grpc]\naddress = "/run/other.sock"\n'
CRI_2 = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "nvidia"\n'


def made(texts: dict[Path, str], release: tuple[int, ...]) -> dict[Path, str]:
    files = Files(MAIN, texts)
    changed = changes(files, release, SHIM)
    again = {path: texts[path] for path in texts} | changed
    assert changes(Files(MAIN, again), release, SHIM) == {}, "a second time changes nothing"
    for path, text in changed.items():
        old, new = tomllib.loads(texts.get(path, "")), tomllib.loads(text)
        assert handler(new)["runtime_path"] == SHIM if handler(new) else path == MAIN
        new.pop("imports", None)
        old.pop("imports", None)
        assert strayed(old | {"version": new["version"]}, new) == []
        kept = [line for line in texts.get(path, "").splitlines() if not line.startswith("imports")]
        assert [line for line in text.splitlines() if line in kept] == kept, "every line stays, in its order"
    return changed


@pytest.mark.parametrize(
    ("texts", "release", "expected"),
    [
        pytest.param({MAIN: OF_DEBIAN}, (1, 7, 24), [MAIN], id="1.7-takes-no-drop-in"),
        pytest.param({MAIN: OF_DEBIAN}, (2, 1, 4), [MAIN], id="2.x-takes-no-drop-in-next-to-version-2"),
        pytest.param({MAIN: OF_VERSION_3}, (2, 1), [DROP_IN, MAIN], id="an-import-is-added"),
        pytest.param({MAIN: 'version = 4\nimports = ["conf.d/*.toml"]\n'}, (2, 4), [DROP_IN], id="relative-import"),
        pytest.param({MAIN: 'version = 3\nimports = ["/x/*.toml"]\n'}, (2, 2), [DROP_IN, MAIN], id="imports-grow"),
        pytest.param({}, (1, 7), [MAIN], id="1.7-without-a-file"),
        pytest.param({}, (2, 0), [DROP_IN, MAIN], id="2.x-without-a-file"),
        pytest.param(
            {MAIN: f'version = 2\nimports = ["{OTHER}"]\n', OTHER: CRI_2},
            (1, 7),
            [OTHER],
            id="1.7-replaced-CRI",
        ),
    ],
)
def test_files_that_change(texts: dict[Path, str], release: tuple[int, ...], expected: list[Path]) -> None:
    assert sorted(made(texts, release)) == sorted(expected)


@pytest.mark.parametrize("release", [(1, 7), (2, 1)])
def test_table_that_is_there_is_corrected_where_it_is(release: tuple[int, ...]) -> None:
    plugin = "io.containerd.grpc.v1.cri" if release < (2,) else "io.containerd.cri.v1.runtime"
    table = f'[plugins."{plugin}".containerd.runtimes.kybernate'
    text = (
        f"version = {2 if release < (2,) else 3}\n{table}]\nruntime_type = 'io.containerd.kybernate.v1'\n"
        f"pod_annotations = ['kybernate.io/*', 'org.criu.config']\n{table}.options]\nSystemdCgroup = true\n"
    )
    changed = changes(Files(MAIN, {MAIN: text}), release, SHIM)
    found = handler(tomllib.loads(changed[MAIN]))
    assert found["runtime_type"] == "io.containerd.runc.v2"
    assert found["pod_annotations"] == ["kybernate.io/*", "org.criu.config"]
    assert found["options"] == {"SystemdCgroup": True}
    assert list(changed) == [MAIN]


@pytest.mark.parametrize(
    ("main", "text", "words"),
    [
        (MAIN, "version = 1\n", "version 1"),
        (MAIN, "", "version 1"),
        (MAIN, "version = 5\n", "version 5"),
        (MAIN, "version = '2'\n", "version 0"),
        (MAIN, "version = 2\n[[[", "not valid TOML"),
        (MAIN, "version = 2\nplugins = 7\n", "cannot be extended"),
        (MAIN, 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\ncontainerd = [1]\n', "cannot be extended"),
        (Path("/var/lib/rancher/k3s/agent/etc/containerd/config.toml"), "version = 3\n", "next start"),
        (Path("/var/snap/microk8s/1/args/containerd.toml"), "version = 3\n", "next start"),
    ],
)
def test_refusals_say_what_to_do(main: Path, text: str, words: str) -> None:
    with pytest.raises(Failure, match=words) as refused:
        changes(Files(main, {main: text}), (1, 7), SHIM)
    assert refused.value.advice
    assert refused.value.state == "nothing was changed"


def test_difference_is_a_patch() -> None:
    files = Files(MAIN, {MAIN: OF_VERSION_3})
    shown = difference(files, changes(files, (2, 1), SHIM))
    assert f"--- /dev/null\n+++ {DROP_IN}\n" in shown
    assert '+imports = ["/etc/containerd/conf.d/*.toml"]' in shown
    assert [line for line in shown.splitlines() if line.startswith("-") and not line.startswith("---")] == []


def test_imports_are_absolute() -> None:
    assert imported('imports = ["conf.d/*.toml", "/x.toml"]', MAIN) == ["/etc/containerd/conf.d/*.toml", "/x.toml"]


@pytest.mark.parametrize(("form", "name"), [(2, "kybernate-1.7.toml"), (3, "kybernate-2.toml")])
def test_packaged_files_have_the_same_table(form: int, name: str) -> None:
    release = (1, 7) if form == 2 else (2, 1)
    written = changes(Files(MAIN, {}), release, SHIM)
    packaged = tomllib.loads((PACKAGING / name).read_text())
    assert handler(packaged) == handler(tomllib.loads(written[MAIN if form == 2 else DROP_IN]))


def test_strayed_settings_are_named() -> None:
    before: dict[str, Any] = {"imports": [], "plugins": {"p": {"a": 1, "b": {"c": 2}}}}
    after: dict[str, Any] = {
        "imports": ["x"],
        "plugins": {
            "p": {"a": 1, "b": {"c": 3}},
            "io.containerd.cri.v1.runtime": {"containerd": {"runtimes": {"kybernate": {"runtime_type": "x"}}}},
        },
    }
    assert strayed(before, after) == ["plugins > p > b > c"]
