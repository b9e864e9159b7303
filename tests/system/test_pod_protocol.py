"""How often containerd executes the shim for a pod, and pods over a change of what the shim answers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.containerd_config import SHIM
from tests.lab.node import Containerd
from tests.system.cri import Cri, Pod
from tests.system.ctr import BUNDLES, containerd_version
from tests.system.programs import script

STOCK_SHIM = "/usr/bin/containerd-shim-runc-v2"
SLEEP = ["sleep", "1000"]


@contextmanager
def replaced(program: str, text: str, directory: Path) -> Iterator[None]:
    """Put a script in the place of a program, which is `$program` in it."""
    kept = directory / "program"
    shutil.copy(program, kept)
    new = script(directory / "script", f"program={kept}\n{text}")
    try:
        _put(new, Path(program))
        yield
    finally:
        _put(kept, Path(program))


def _put(source: Path, target: Path) -> None:
    """Replace a file in one step, as a package manager does: containerd may execute it at any time."""
    shutil.copy(source, target.with_suffix(".new"))
    target.with_suffix(".new").rename(target)


@pytest.mark.parametrize("handler", ["kybernate", "kybernate-path"])
def test_program_is_executed_as_often_as_the_stock_one(handler: str, tmp_path: Path) -> None:
    """By containerd 2 once to `start` a pod, whatever its containers are. 1.7 asks for each, and 2.4 deletes each."""
    ours, stock = _executed(handler, SHIM, tmp_path / "ours"), _executed("runc", STOCK_SHIM, tmp_path / "stock")
    assert ours == stock
    assert ours["start"] == (1 if containerd_version() >= (2, 0) else 4)


def _executed(handler: str, program: str, directory: Path) -> Counter[str]:
    """Return how often a pod of three containers has a shim executed, by the last word of its command line."""
    directory.mkdir()
    executed = directory / "executed"
    count = f'for word; do :; done\necho "$word" >> {executed}\nexec "$program" "$@"'
    with replaced(program, count, directory), Cri(handler=handler) as cri:
        pod = cri.run_pod()
        for number in range(3):
            id = cri.run(pod, f"c{number}", SLEEP)
            assert cri.exec(id, "echo", "said") == (0, "said\n")
        cri.stop(id)
        cri.remove(id)
        cri.remove_pod(pod)
        words = Counter(executed.read_text().split())
    return Counter({word: words[word] for word in ("start", "delete")})


OLDER = """case " $* " in
*" start "*) "$program" "$@" | sed -E 's/.*"address": "([^"]*)".*/\\1/' ;;
*) exec "$program" "$@" ;;
esac"""


def test_pod_that_was_started_with_the_older_answer_keeps_working(containerd: Containerd, tmp_path: Path) -> None:
    with Cri(handler="kybernate-path") as cri:
        with replaced(SHIM, OLDER, tmp_path):
            pod = cri.run_pod()
            ids = [cri.run(pod, "before", SLEEP)]
        ids.append(cri.run(pod, "after", SLEEP))
        _all_work(cri, ids)
        containerd.restart()
        ids.append(cri.run(pod, "later", SLEEP))
        _all_work(cri, ids)
        _ends(cri, pod, ids)


@pytest.mark.parametrize("handler", ["kybernate", "kybernate-path"])
def test_pod_keeps_working_over_restarts_of_containerd(containerd: Containerd, handler: str) -> None:
    with Cri(handler=handler) as cri:
        pod = cri.run_pod()
        ids = []
        for number in range(3):
            ids.append(cri.run(pod, f"c{number}", SLEEP))
            containerd.restart()
            _all_work(cri, ids)
        _ends(cri, pod, ids)


def test_every_bundle_of_a_pod_says_where_its_daemon_is_and_whose_it_is() -> None:
    with Cri(handler="kybernate-path") as cri, cri.pod() as pod:
        bundles = [BUNDLES / "k8s.io" / id for id in (pod.id, cri.run(pod, "one", SLEEP), cri.run(pod, "two", SLEEP))]
        assert len({(bundle / "address").read_text() for bundle in bundles}) == 1
        assert {(bundle / "shim-binary-path").read_text() for bundle in bundles} == {SHIM}


def _all_work(cri: Cri, ids: list[str]) -> None:
    assert {cri.state(id) for id in ids} == {"CONTAINER_RUNNING"}
    assert {cri.exec(id, "echo", "said") for id in ids} == {(0, "said\n")}


def _ends(cri: Cri, pod: Pod, ids: list[str]) -> None:
    for id in ids:
        cri.stop(id)
        assert cri.status(id).exit_code == 137
        cri.remove(id)
    cri.remove_pod(pod)
