"""What a client that streams sees while its model wakes: comments that keep connections open, or chunks that it shows.

Pure: the words for a place in the queue and seconds.
"""

from __future__ import annotations

import json
from typing import Final

SSE: Final = "text/event-stream"


def comment(place: int, seconds: float, left: float = 0.0) -> bytes:
    """Return a comment line, which every reader of server-sent events skips; `left` is 0 where unknown."""
    return f": waiting, place {place}, {seconds:.0f} s{_left(left)}\n\n".encode()


def _left(seconds: float) -> str:
    return f", about {seconds:.0f} s left" if seconds else ""


def chunk(model: str, id: str, created: int, place: int, seconds: float, left: float) -> bytes:
    """Return a chunk of a chat completion whose reasoning says what is waited for; `left` is 0 where unknown."""
    words = f"{model} is waking: place {place}, {seconds:.0f} s so far{_left(left)}"
    delta = {"role": "assistant", "content": "", "reasoning_content": f"{words}\n"}
    content = {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }
    return f"data: {json.dumps(content)}\n\n".encode()
