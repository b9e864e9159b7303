"""A container of a pod starts again, as the kubelet has it: in the same pod, with the same annotations, by a new id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kybernate_shim.checkpoint.image.starts import MOST_SHORT_RUNS
from kybernate_shim.checkpoint.image.store import read_image
from tests.system.checkpoints import kybernate, refused
from tests.system.cri import Cri, Pod
from tests.system.ctr import eventually
from tests.system.tenants import pods_place

FROM, ON_RESTART = "kybernate.io/restore-from", "kybernate.io/on-restart"
COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"]
FRESH = ["sh", "-c", "echo fresh; sleep 1000"]


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri("kybernate") as found:
        yield found


@pytest.fixture
def first() -> Iterator[Path]:
    with pods_place() as place:
        yield place


@pytest.fixture
def second() -> Iterator[Path]:
    with pods_place() as place:
        yield place


def checkpoint(pod: Pod, image: Path, *flags: str) -> None:
    kybernate("checkpoint", f"default/{pod.config.metadata.name}/counter", image.name, *flags)


def begun(cri: Cri, image: Path) -> int:
    """Leave an image of a counter whose pod is gone; return where it stopped."""
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", "5")
        checkpoint(pod, image, "--exit")
        return int(cri.log(pod, "counter")[-1])


def first_line(cri: Cri, pod: Pod, attempt: int) -> str:
    return str(eventually(lambda: cri.log(pod, "counter", attempt))[0])


def test_container_that_ends_continues_from_the_newest_image_that_it_wrote(cri: Cri, first: Path, second: Path) -> None:
    stopped = begun(cri, first)
    with cri.pod(annotations={FROM: first.name}) as pod:
        id = cri.run(pod, "counter", FRESH)
        cri.await_log(pod, "counter", str(stopped + 5))
        checkpoint(pod, second)
        written = read_image(second).manifest
        assert written.lineage.parent == read_image(first).manifest.id
        assert written.origin == read_image(first).manifest.source.container
        seen = int(cri.log(pod, "counter")[-1])
        end(cri, id)
        id = cri.run(pod, "counter", FRESH, attempt=1)
        again = int(first_line(cri, pod, 1))
        assert stopped + 5 < again <= seen + 3
        cri.await_log(pod, "counter", str(again + 3), attempt=1)
        with pods_place() as third:
            checkpoint(pod, third, "--exit")
            eventually(lambda: cri.state(id) == "CONTAINER_EXITED")
            last = int(cri.log(pod, "counter", 1)[-1])
            cri.run(pod, "counter", FRESH, attempt=2)
            assert int(first_line(cri, pod, 2)) == last + 1
            shown = kybernate("inspect", third.name)
            assert f"comes from: {written.id}, of the lineage of {written.origin}" in " ".join(shown.split())


def end(cri: Cri, id: str) -> None:
    """Kill a container, as a crash does."""
    cri.stop(id)
    eventually(lambda: cri.state(id) == "CONTAINER_EXITED")


@pytest.mark.parametrize(("restart", "fresh"), [("fresh", True), ("same", False), ("", False)])
def test_what_a_restart_begins_with_is_a_choice(cri: Cri, first: Path, restart: str, fresh: bool) -> None:
    stopped = begun(cri, first)
    with cri.pod(annotations={FROM: first.name, **({ON_RESTART: restart} if restart else {})}) as pod:
        for attempt in range(2):
            id = cri.run(pod, "counter", FRESH, attempt=attempt)
            wanted = "fresh" if fresh and attempt else str(stopped + 1)
            assert first_line(cri, pod, attempt) == wanted
            end(cri, id)


def test_image_that_holds_a_crash_is_left_aside(cri: Cri, first: Path) -> None:
    stopped = begun(cri, first)
    with cri.pod(annotations={FROM: first.name}) as pod:
        for attempt in range(MOST_SHORT_RUNS):
            id = cri.run(pod, "counter", FRESH, attempt=attempt)
            assert first_line(cri, pod, attempt) == str(stopped + 1)
            end(cri, id)
        cri.run(pod, "counter", FRESH, attempt=MOST_SHORT_RUNS)
        assert first_line(cri, pod, MOST_SHORT_RUNS) == "fresh"
        kept = Path(f"/var/lib/kybernate/work/pods/{pod.config.metadata.uid}.json")
        assert len(json.loads(kept.read_text())["containers"]["counter"]) == MOST_SHORT_RUNS


def test_image_that_is_gone_lets_a_restart_begin_fresh(cri: Cri, first: Path) -> None:
    begun(cri, first)
    with cri.pod(annotations={FROM: first.name}) as pod:
        id = cri.run(pod, "counter", FRESH)
        eventually(lambda: cri.log(pod, "counter"))
        end(cri, id)
        for path in first.iterdir():
            path.unlink()
        first.rmdir()
        cri.run(pod, "counter", FRESH, attempt=1)
        assert first_line(cri, pod, 1) == "fresh"


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({FROM: "/var/lib/kybernate/checkpoints/default/NAME"}, "pods name images by their name below"),
        ({FROM: "NAME@newest"}, "expected NAME, NAME@latest or latest"),
        ({FROM: "NAME", ON_RESTART: "often"}, "on-restart: expected fresh, same or latest"),
    ],
)
def test_request_without_a_meaning_is_refused(cri: Cri, first: Path, annotations: dict[str, str], words: str) -> None:
    begun(cri, first)
    named = {key: value.replace("NAME", first.name) for key, value in annotations.items()}
    with cri.pod(annotations=named) as pod:
        id = cri.create(pod, "counter", FRESH)
        with pytest.raises(grpc.RpcError, match=words):
            cri.start(id)


def test_no_image_is_called_latest(cri: Cri) -> None:
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNTER)
        cri.await_log(pod, "counter", "2")
        said = refused("kybernate", "checkpoint", f"default/{pod.config.metadata.name}", "latest")
        assert "what pods call their newest image" in said
