"""The JSON schema of models.yaml, for editors, and an example of the file."""

from __future__ import annotations

from typing import Any, Final

from kybernate.up.models_file import NAME, NETWORKS


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors."""
    variable = {"type": "string", "pattern": r"\$\{"}  # stands for a number
    text, time = {"type": "string"}, {"type": ["string", "number"]}
    number = {"anyOf": [{"type": "integer", "minimum": 0}, variable]}
    texts = {"oneOf": [text, {"type": "array", "items": text}]}
    gpu = {"type": ["integer", "string"]}
    model = {
        "image": text,
        "command": texts,
        "gpus": {"oneOf": [gpu, {"type": "array", "items": gpu}]},
        "port": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, variable]},
        "env": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
        "mounts": texts,
        "user": number,
        "health": {"type": "string", "pattern": "^/"},
        "start-timeout": time,
        "warm-up": {
            "type": "object",
            "properties": {"path": {"type": "string", "pattern": "^/"}, "body": {}},
            "additionalProperties": False,
        },
        "template": {"type": "boolean"},
        "aliases": texts,
        "upstream-model": text,
        "idle-timeout": time,
        "disk-after": time,
        "concurrency": number,
        "priority": number,
        "seat": text,
        "arena": {"type": "boolean"},
        "network": {"enum": [*NETWORKS]},
        "windows": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"days": texts, "from": time, "to": time},
                "additionalProperties": False,
            },
        },
        "filters": {
            "type": "object",
            "properties": {"set": {"type": "object"}, "strip": texts, "override": {"type": "object"}},
            "additionalProperties": False,
        },
    }
    one = {"type": "object", "properties": model, "additionalProperties": False}
    peer = {
        "type": "object",
        "properties": {"url": text, "models": texts, "key_file": {"type": "string", "pattern": "^/"}},
        "required": ["url", "models"],
        "additionalProperties": False,
    }
    selector = {
        "type": "object",
        "properties": {
            "choose": {"enum": ["warm", "spillover", "weights"]},
            "of": texts,
            "weights": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
        "required": ["choose", "of"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "models.yaml of kybernate up",
        "type": "object",
        "properties": {
            "project": {"type": "string", "pattern": f"^{NAME.pattern}$"},
            "listen": text,
            "env_file": texts,
            "defaults": one,
            "models": {"type": "object", "additionalProperties": one},
            "peers": {"type": "object", "additionalProperties": peer},
            "selectors": {"type": "object", "additionalProperties": selector},
            "matrix": {
                "type": "object",
                "properties": {
                    "vars": {"type": "object", "additionalProperties": text},
                    "evict_costs": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
                    "sets": {"type": "object", "additionalProperties": text},
                },
                "required": ["sets"],
                "additionalProperties": False,
            },
            "keys": {"type": "string", "pattern": "^/"},
        },
        "required": ["models"],
        "additionalProperties": False,
    }


EXAMPLE: Final = """\
# What `kybernate up` runs. docs/up.md explains each key; `kybernate up --check` reads this file and starts nothing.
listen: 127.0.0.1:8080           # the one address of all models

defaults:
  idle-timeout: 5m               # without a request for so long, a model leaves the GPU
  gpus: [0]

models:
  qwen:
    image: docker.io/vllm/vllm-openai:latest
    command: ["vllm", "serve", "Qwen/Qwen3-8B", "--port", "${PORT}"]
    mounts: ["/srv/models:/root/.cache/huggingface:rw"]
    health: /health
    warm-up: {path: /v1/completions, body: {model: Qwen/Qwen3-8B, prompt: hello, max_tokens: 1}}
    upstream-model: Qwen/Qwen3-8B
  llama:
    command: /usr/local/bin/llama-server --port ${PORT} -m /srv/models/llama.gguf    # a program of the host
    mounts: [/srv/models]
    aliases: [gpt-4o-mini]
"""
