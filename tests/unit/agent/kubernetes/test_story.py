"""Which of the agent's events appear on a pod, and in which words."""

from __future__ import annotations

import re

import pytest

from kybernate.agent.events.log import made
from kybernate.agent.inventory.happenings import DONE, LONG, operation_ended, operation_started
from kybernate.agent.keeping.parking import PARKED
from kybernate.agent.kubernetes.story import STORY, Told, parked, quantity, shortened, told
from kybernate.messages import agent_pb2 as wire

IMAGE = "/var/lib/kybernate/checkpoints/shop/nightly"


def test_checkpoint_reads_as_a_story() -> None:
    begun = made("checkpoint.started", "info", "…", image=IMAGE)
    done = made("container.checkpointed", "info", "…", image=IMAGE, bytes=13_002_342, seconds="1.234", frozen_ms="412")
    assert told(begun) == Told("Checkpointing", "Writing image nightly")
    assert told(done) == Told("Checkpointed", "Wrote image nightly: 12.4 MiB in 1.2 s, frozen for 0.4 s")


def test_failure_is_a_warning_with_its_cause() -> None:
    event = made(
        "checkpoint.failed", "warning", "the checkpoint of … failed", error="inotify cannot be dumped: close it"
    )
    assert told(event) == Told(
        "CheckpointFailed", "No image was written: inotify cannot be dumped: close it", warning=True
    )


def test_failure_of_the_agents_own_has_the_words_of_its_verb() -> None:
    event = made("operation.failed", "error", "…", verb="suspend", error="the suspend had 3 s")
    assert told(event) == Told("SuspendFailed", "The container keeps its GPUs: the suspend had 3 s", warning=True)
    assert told(made("operation.failed", "error", "…", verb="export", error="x")) is None


@pytest.mark.parametrize("verb", DONE)
@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled", "not back"])
def test_each_end_of_a_shims_operation_is_told(verb: str, outcome: str) -> None:
    happened = operation_ended("shop/web/main", verb, outcome, IMAGE, "cause")
    assert happened is not None
    what = told(made(happened.type, happened.level, happened.message, image=IMAGE, error="cause"))
    assert what is not None
    assert what.warning == (outcome not in ("done", "cancelled"))
    assert what.message.endswith("cause") == what.warning


@pytest.mark.parametrize("verb", LONG)
def test_each_begin_that_is_recorded_is_told(verb: str) -> None:
    happened = operation_started("shop/web/main", verb, IMAGE)
    assert happened is not None
    assert told(made(happened.type, happened.level, happened.message, image=IMAGE)) is not None


@pytest.mark.parametrize("type", STORY)
def test_reason_is_one_word_as_kubelets_and_message_has_no_path_of_the_node(type: str) -> None:
    what = told(made(type, "info", "as it is", image=IMAGE, verb="checkpoint"))
    assert what is not None
    assert re.fullmatch(r"([A-Z][a-z]+|GPU)+", what.reason)
    assert "/" not in what.message


def test_what_kubelet_says_itself_is_not_repeated() -> None:
    assert told(made("container.started", "info", "…")) is None


def test_parking_is_told_of_the_policys_operations_alone() -> None:
    operation = wire.Operation(state=wire.SUCCEEDED, image=IMAGE)
    assert parked(operation) is None
    operation.labels.update({PARKED: "id", "kybernate.io/reason": "idle for 3 h"})
    assert parked(operation) == Told(
        "Parked", "The node's policy has ended the container, whose state is in image nightly: idle for 3 h"
    )


def test_sizes_and_texts_are_bounded() -> None:
    assert [quantity(size) for size in (17, 1536, 5 << 40)] == ["17 B", "1.5 KiB", "5.0 TiB"]
    assert quantity(1 << 60).endswith("TiB")
    assert shortened("a\nb") == "a b"
    assert len(shortened("ä" * 5000).encode()) <= 1024
