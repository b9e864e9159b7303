"""The names by which daemons of earlier releases call methods: a node is upgraded while its containers run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kybernate_shim.ttrpc import Call, Method

FORMER_NAMES: Final = {"Take": "Offload", "Give": "Reload"}


def with_former_names(methods: Mapping[str, Method], log: Any) -> dict[str, Method]:
    """Return the table with the former names, of which the first use of each is logged."""
    warned: set[str] = set()

    def former(method: Method, now: str) -> Method:
        async def handle(request: Any, call: Call) -> Any:
            if call.method not in warned:
                warned.add(call.method)
                log.warning("rpc.deprecated", method=call.method, replacement=now)
            return await method.handle(request, call)

        return replace(method, handle=handle)

    return {**methods, **{name: former(methods[now], now) for name, now in FORMER_NAMES.items()}}
