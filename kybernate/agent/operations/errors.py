"""What a caller of the operations can do something about, and the facts with which an operation can fail by itself."""

from __future__ import annotations

from typing import Final

OPERATION_NOT_FOUND_ADVICE: Final = "`kybernate ops` lists the operations"
TOO_MANY_OPERATIONS_ADVICE: Final = "wait until some of them have ended, or cancel them; `kybernate ops` lists them"
AGENT_STOPPING_ADVICE: Final = "repeat the request, with the same idempotency key, when the agent runs again"
