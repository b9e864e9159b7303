"""Operations as our own service reports them: the one that runs, those that have ended, and their steps."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.steps import Step
from kybernate_shim.task.outcomes import Ledger, Outcome


def steps_of(steps: Iterable[Step]) -> list[wire.Step]:
    return [
        wire.Step(name=step.name, seconds=step.seconds, bytes=step.bytes, spared_bytes=step.spared) for step in steps
    ]


def ended(outcome: Outcome) -> wire.Ended:
    return wire.Ended(
        operation=outcome.id,
        verb=outcome.verb,
        outcome=outcome.ending,
        code=outcome.code,
        error=plain(outcome.error),
        state=plain(outcome.state),
        steps=steps_of(outcome.steps),
        bytes=outcome.image_bytes,
        frozen_ms=outcome.frozen_ms,
        vram_bytes=outcome.vram_bytes,
        source=outcome.source,
        path=plain(outcome.path),
        manifest_digest=outcome.manifest_digest,
        seconds=outcome.seconds,
        seconds_ago=time.monotonic() - outcome.at,
    )


def add_ended(reply: wire.Container, ledger: Ledger) -> None:
    """Add the operations that have ended, if there are any."""
    for outcome in ledger.outcomes[:1]:
        reply.last.CopyFrom(ended(outcome))
    reply.earlier.extend(map(ended, ledger.outcomes[1:]))
