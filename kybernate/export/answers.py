"""Documents that image registries answer with, bounded: the operator of one chooses their bytes.

The stream of an answer has its limit by `kybernate.export.guard`, since httpx reads some bodies by itself.
"""

from __future__ import annotations

from typing import Any, Final

import httpx

from kybernate.export.documents import MOST_DOCUMENT
from kybernate_shim import bounded_json

MOST_BYTES: Final = MOST_DOCUMENT + (1 << 20)  # more than of a manifest, which its reader refuses in better words
MOST_NESTED: Final = 8


def document_of(response: httpx.Response) -> Any:
    """Return the JSON value that is an answer's body. Raises ValueError and httpx.HTTPError."""
    return bounded_json.parse(response.read(), most_bytes=MOST_BYTES, most_nested=MOST_NESTED)
