"""A recording of the page's data: what is read is what was told, and one moment of it is a page."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate.page.known import Known
from kybernate.page.view import (
    Begin,
    Change,
    Container,
    End,
    Event,
    Found,
    Gone,
    Gpu,
    Image,
    Lost,
    Operation,
    Put,
    Seat,
    Share,
    Step,
    Tier,
)
from tests.fakes.agent import FakeAgent
from tests.gpu.page_record import NODE, Moment, decoded, encoded, read, recording, state_at, telling_moment
from tests.unit.client.conftest import fake as fake  # the fixture

LLAMA = Container("k8s.io/a", "models/llama", "", "running", "suspended", host_bytes=14, gpus=("GPU-0",))
QWEN = Container("k8s.io/b", "models/qwen", "", "running", "attached", gpus=("GPU-0",), in_flight=2)
WAKING = Operation("2", "wake", "running", "k8s.io/a", "models/llama", created=50, step="copy", done=3, total=14)
TOLD: tuple[Change, ...] = (
    Lost("the agent does not answer", "start it"),
    Found("a-name-of-the-machine", (("driver", "580.1"),)),
    Begin(),
    Put(Gpu("GPU-0", 0, "NVIDIA H100", 80, 30, (Share("k8s.io/b", 14),))),
    Put(LLAMA),
    Put(QWEN),
    Put(Seat("g0-s1", gpus=(0,), status="active", container="k8s.io/b", waits=("use",))),
    Put(Tier("ram", "/dev/shm", 64, 8, 56, 1)),
    Put(Image("image-1", "llama", tiers=("ram", "disk"), pinned=True)),
    End(),
    Put(Operation("1", "resume", "succeeded", "k8s.io/a", created=1, ended=2, steps=(Step("copy", 0.5, 14),))),
    Put(Event(1, 3.0, "container.suspended", "info", "llama is suspended", "a")),
    Put(WAKING),
    Put(Container("k8s.io/c", "models/ended")),
    Gone(Container("k8s.io/c", "models/ended")),
)
MOMENTS = tuple(Moment(float(number), change) for number, change in enumerate(TOLD))


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda one: type(one.change).__name__)
def test_line_is_the_moment(moment: Moment) -> None:
    assert decoded(encoded(moment)) == moment


def test_recording_that_was_killed_is_read_until_then(tmp_path: Path) -> None:
    path = tmp_path / "page.jsonl.gz"
    whole = gzip.compress(b"".join(map(encoded, MOMENTS)))
    path.write_bytes(whole[:-20])
    found = read(path)
    assert found == list(MOMENTS[: len(found)])
    assert len(found) > 3
    path.write_bytes(whole)
    assert read(path) == list(MOMENTS)


def test_state_shows_what_was_known_at_a_moment() -> None:
    at = telling_moment(MOMENTS)
    assert MOMENTS[int(at)].change == Put(WAKING)
    known = Known()
    for change in state_at(MOMENTS, at):
        known.apply(change)
    assert known.name == NODE
    assert known.trouble is None
    assert [one.title for one in known.containers()] == ["models/llama", "models/qwen"]
    assert known.operations()[0] == WAKING
    assert known.wakes("k8s.io/a") == (1.0,)
    assert known.gpus()[0].shares == (Share("k8s.io/b", 14),)
    assert [len(found) for found in (known.seats(), known.tiers(), known.images())] == [1, 1, 1]


def test_state_leaves_free_seats_out() -> None:
    free = Moment(0.0, Put(Seat("g0-s2", gpus=(0,), status="free")))
    known = Known()
    for change in state_at((*MOMENTS, free), MOMENTS[-1].at):
        known.apply(change)
    assert [one.key for one in known.seats()] == ["g0-s1"]


def test_record_without_a_wake_shows_its_end() -> None:
    assert telling_moment(MOMENTS[:10]) == 9.0
    assert telling_moment(()) == 0.0


def test_recording_has_what_an_agent_tells(fake: FakeAgent, tmp_path: Path) -> None:
    fake.changes = [wire.Change(revision=8, instance="i1", gpu=wire.Gpu(uuid="GPU-0", total_bytes=9))]
    path = tmp_path / "page.jsonl.gz"

    def is_taken() -> bool:
        return any(isinstance(one, wire.WatchRequest) and one.revision == 8 for one in fake.requests)

    with recording(str(fake.socket), path, os.environ):
        end = time.monotonic() + 60
        while not is_taken():
            assert time.monotonic() < end, fake.requests
            fake.stop()  # the next connection says what the one before has taken
            fake.start()
            time.sleep(0.05)
    told = [one.change for one in read(path)]
    assert Put(Gpu("GPU-0", 0, "", 9, 0)) in told
    assert any(isinstance(one, Lost) for one in told)
    assert any(isinstance(one, Found) for one in told)
