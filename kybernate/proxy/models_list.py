"""The answer of /v1/models: all models with their states, in a form that clients of OpenAI and Anthropic both read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.engine import Refused
from kybernate.proxy.settings import Settings

EPOCH = "1970-01-01T00:00:00Z"  # when a model was made is nothing that the proxy knows


def whole_list(settings: Settings, phases: Mapping[str, str]) -> dict[str, Any]:
    """Return all models, aliases as models of their own, selectors and those of peers."""
    data = list(_all(settings, phases).values())
    ids = [one["id"] for one in data]
    return {
        "object": "list", "data": data, "has_more": False,
        "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None,
    }  # fmt: skip


def listed(settings: Settings, phases: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the answer for one model, or for all where `name` is empty. Raises Refused for one that is unknown."""
    found = one_model(settings, phases, name) if name else whole_list(settings, phases)
    if found is None:
        raise Refused(Refusal(404, "model_not_found", f"the model `{name}` does not exist"))
    return found


def one_model(settings: Settings, phases: Mapping[str, str], name: str) -> dict[str, Any] | None:
    """Return one of them, None where there is none of this name."""
    return _all(settings, phases).get(name)


def _all(settings: Settings, phases: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for model in settings.models:
        for name in (model.name, *model.aliases):
            found[name] = _entry(name, str(phases[model.name]), alias_of=model.name if name != model.name else None)
    for selector in settings.selectors:
        found[selector.name] = _entry(selector.name, "selector", selects=list(selector.of))
    for peer in settings.peers:
        found |= {name: _entry(name, "peer", peer=peer.name) for name in peer.models if name not in found}
    return found


def _entry(name: str, state: str, **more: Any) -> dict[str, Any]:
    entry = {
        "id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "created_at": EPOCH,
        "owned_by": "kybernate", "state": state,
    }  # fmt: skip
    return entry | {key: value for key, value in more.items() if value is not None}
