"""models.yaml from a local ollama: its models as entries for llama-server where that is installed, else for ollama.

The models are read from ollama's own directory, which needs no program of it to run, or else asked of its API.
Source: ollama's docs/api.md, and the layout of its models directory: manifests/HOST/NAMESPACE/NAME/TAG are image
manifests, whose layers are blobs/sha256-DIGEST.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kybernate.node.failure import Missing, Unavailable
from kybernate.up.importing import Imported, entry_name_of
from kybernate_shim import bounded_json

MODEL_LAYER: Final = "application/vnd.ollama.image.model"
PROJECTOR_LAYER: Final = "application/vnd.ollama.image.projector"
NOT_CARRIED: Final = ("template", "system", "params", "adapter")  # kinds of layers
ANSWER_SECONDS: Final = 10.0
ANSWER_BYTES: Final = 16 << 20
DIRECTORIES: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama/models")


def from_ollama(environment: Mapping[str, str], *, llama_server: str, ollama: str) -> Imported:
    """Return the models of a local ollama; the arguments are where the programs are, "" for none.

    Raises Missing where there is no ollama, and Unavailable where it does not answer.
    """
    directory = _directory(environment)
    if directory is not None and llama_server:
        return _of_llama_server(directory, llama_server)
    if not ollama:
        raise Missing("neither llama-server nor ollama is installed", state="nothing was written")
    names = _names_in(directory) if directory is not None else _asked(environment)
    return _of_ollama(names, directory, ollama)


def _directory(environment: Mapping[str, str]) -> Path | None:
    named = environment.get("OLLAMA_MODELS")
    places = [Path(named)] if named else [Path(one).expanduser() for one in DIRECTORIES]
    return next((one for one in places if (one / "manifests").is_dir()), None)


def _manifests(directory: Path) -> dict[str, Path]:
    """Return the manifest of each model, by the name that ollama lists."""
    found = {}
    for path in sorted((directory / "manifests").glob("*/*/*/*")):
        host, namespace, name, tag = path.relative_to(directory / "manifests").parts
        short = name if (host, namespace) == ("registry.ollama.ai", "library") else f"{namespace}/{name}"
        found[f"{short}:{tag}"] = path
    return found


def _names_in(directory: Path) -> list[str]:
    return list(_manifests(directory))


def _of_llama_server(directory: Path, llama_server: str) -> Imported:
    found = Imported()
    for name, manifest in _manifests(directory).items():
        try:
            layers = bounded_json.parse(manifest.read_bytes())["layers"]
            blobs = {str(one["mediaType"]): _blob(directory, str(one["digest"])) for one in layers}
        except (OSError, ValueError, LookupError, TypeError) as error:
            found.lost.append(f"{name}: its manifest cannot be read: {error}")
            continue
        if MODEL_LAYER not in blobs:
            found.lost.append(f"{name}: has no weights of its own")
            continue
        command = [
            llama_server,
            "--port",
            "${PORT}",
            "--host",
            "127.0.0.1",
            "-m",
            str(blobs[MODEL_LAYER]),
            "-ngl",
            "999",
        ]
        if PROJECTOR_LAYER in blobs:
            command += ["--mmproj", str(blobs[PROJECTOR_LAYER])]
        lost = [kind for kind in NOT_CARRIED if any(media.endswith(f".{kind}") for media in blobs)]
        if lost:
            found.lost.append(f"{name}: {', '.join(lost)} of its Modelfile; llama-server takes the weights' own")
        found.models[entry_name_of(name, found.models)] = {
            "command": command,
            "gpus": ["all"],
            "mounts": [str(directory)],
            "aliases": _aliases(name),
        }
    return found


def _blob(directory: Path, digest: str) -> Path:
    kind, colon, hexadecimal = digest.partition(":")
    if not colon or not hexadecimal.isalnum() or not kind.isalnum():
        raise ValueError(f"{digest!r} is no digest")
    return directory / "blobs" / f"{kind}-{hexadecimal}"


def _of_ollama(names: list[str], directory: Path | None, ollama: str) -> Imported:
    """Return an entry with an `ollama serve` of its own for each model, which its warm-up loads."""
    found = Imported()
    for name in names:
        place = str(directory or Path(DIRECTORIES[0]).expanduser())
        found.models[entry_name_of(name, found.models)] = {
            "command": [ollama, "serve"],
            "gpus": ["all"],
            "env": {
                "OLLAMA_HOST": "127.0.0.1:${PORT}",
                "OLLAMA_MODELS": place,
                "OLLAMA_KEEP_ALIVE": "-1",
                "HOME": "/tmp",
            },
            "mounts": [f"{place}:{place}:rw"],
            "health": "/api/version",
            "warm-up": {"path": "/api/generate", "body": {"model": name, "prompt": "hello", "stream": False}},
            "upstream-model": name,
            "aliases": _aliases(name),
        }
    return found


def _aliases(name: str) -> list[str]:
    """Return the names by which clients of ollama ask for a model; the tag `latest` may be left out."""
    return [name] + [name.removesuffix(":latest")] * name.endswith(":latest")


def _asked(environment: Mapping[str, str]) -> list[str]:
    host = environment.get("OLLAMA_HOST") or "127.0.0.1:11434"
    url = (host if "://" in host else f"http://{host}") + "/api/tags"
    if not url.startswith(("http://", "https://")):
        raise Unavailable(f"{url} is no address", state="nothing was written")
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            document: Any = bounded_json.parse(answer.read(ANSWER_BYTES))
        return [str(one["name"]) for one in document["models"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(
            f"ollama does not answer at {url}: {error}",
            state="nothing was written",
            advice="start it, or name its models directory in OLLAMA_MODELS",
        ) from error
