"""What is changed in the JSON body of a request before a model gets it. Pure."""

from __future__ import annotations

import json

from kybernate.proxy.settings import Filters
from kybernate_shim import bounded_json


def filtered(body: bytes, filters: Filters, model: str = "") -> bytes:
    """Return the body with `filters` applied, and with the name `model` where that is not empty.

    Raises ValueError for what is no JSON object.
    """
    value = bounded_json.parse(body)
    if not isinstance(value, dict):
        raise ValueError("no object")
    kept = {name: one for name, one in value.items() if name not in filters.strip}
    changed = {**filters.defaults, **kept, **filters.override}
    if model:
        changed["model"] = model
    return json.dumps(changed, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
