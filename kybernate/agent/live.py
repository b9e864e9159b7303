"""What other parts of the agent get of the settings, and what the agent says of them itself. Mostly without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kybernate.agent.events.webhooks import Hook
from kybernate.agent.settings import LiveSettings, OperationLimits, Webhook
from kybernate.messages.agent_pb2 import Finding
from kybernate.node.failure import Failure
from kybernate.verbs.model import Limits

WEBHOOK_KEY_UNUSABLE_ADVICE: Final = (
    "correct `webhooks.key` in agent.toml, or the file, then `systemctl reload kybernate-agent`"
)


def limits_of(settings: OperationLimits) -> Limits:
    """Return the limits of the engine."""
    return Limits(
        running=settings.running,
        copies_per_gpu=settings.per_gpu,
        copies_per_disk=settings.per_disk,
        deadline=settings.deadline,
    )


def hooks_of(settings: Webhook) -> tuple[Hook, ...]:
    """Return the webhooks, with the secret as its file has it now. Raises Failure."""
    secret = _secret(settings.key) if settings.key is not None and settings.urls else b""
    return tuple(Hook(url, secret, types=settings.types, level=settings.level) for url in settings.urls)


def own_findings(live: LiveSettings) -> Iterator[Finding]:
    """Yield what is wrong with the agent's settings."""
    if live.problem:
        yield Finding(
            check="agent.toml",
            level="error",
            message=live.problem,
            advice="the settings from before stay in use; correct the file, then `systemctl reload kybernate-agent`",
        )
    if live.pending:
        yield Finding(
            check="agent.toml",
            level="warning",
            message=f"changed, and not in effect yet: {', '.join(live.pending)}",
            advice="`systemctl restart kybernate-agent`; operations continue",
        )
    for warning in live.current.warnings:
        yield Finding(check="agent.toml", level="warning", message=warning)


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", advice=WEBHOOK_KEY_UNUSABLE_ADVICE) from error
    if not secret:
        raise Failure(f"{path} is empty", advice=WEBHOOK_KEY_UNUSABLE_ADVICE)
    return secret
