"""models.yaml from a configuration of llama-swap: what is carried over, and by name what is not.

Macros are put in place, a command that is `docker run` becomes an image with its mounts and variables, groups become a
matrix. Source: config.example.yaml and config-schema.json of llama-swap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from kybernate.node.failure import Invalid
from kybernate.seats.matrix import MatrixInvalid, read_matrix
from kybernate.up.models_file import NAME

MACRO: Final = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
MOST_NESTED: Final = 32  # macros in each other
MOST_SETS: Final = 256
OWN: Final = {"PORT": "${PORT}", "MODEL_ID": "${MODEL}"}
HEALTH_SECONDS: Final = 120  # of llama-swap, where nothing else is said
IGNORED: Final = {  # keys of the file that have no meaning here
    "logLevel", "logTimeFormat", "logToStdout", "metricsMaxInMemory", "captureBuffer", "ui", "performance", "store",
    "includeAliasesInList", "startPort", "unloadTimeout",
}  # fmt: skip
SAID: Final = {  # and those whose meaning is lost
    "sendLoadingState": "the proxy's settings have `progress` for that",
    "apiKeys": "write their SHA-256 into a file and name it in `keys`",
    "upstream": "requests are routed by their model alone",
    "profiles": "use selectors",
    "hooks": "every model is started once by itself, and then sleeps until it is asked",
}
OF_MODEL: Final = {
    "cmdStop": "the container is stopped",
    "name": "lists have the name of the entry",
    "description": "lists have no descriptions",
    "metadata": "lists have no metadata",
    "capabilities": "lists have no capabilities",
    "unlisted": "all models are listed",
    "timeouts": "the proxy has limits of its own",
    "compat": "a WebSocket wakes its model",
    "sendLoadingState": "the proxy's settings have `progress` for that",
    "unloadTimeout": "a model that sleeps is suspended, and does not have to end",
}


@dataclass
class Imported:
    """A document of models.yaml as it grows, and what was not carried over."""

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of entries, by llama-swap's

    def text(self, origin: str) -> str:
        """Return the file."""
        head = [f"# Made from {origin} by `kybernate up --import`. Look at `gpus` and `mounts` of each model."]
        if self.lost:
            head += ["# Not carried over:", *(f"#   {one}" for one in self.lost)]
        document = {"listen": "127.0.0.1:8080", **self.rest, "models": self.models}
        return "\n".join(head) + "\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def from_llama_swap(path: Path, environment: Mapping[str, str]) -> Imported:
    """Return the models of a configuration of llama-swap. Raises Invalid."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise Invalid(f"{path} cannot be read: {error}", state="nothing was written") from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), dict):
        raise Invalid(f"{path} has no `models`, and is no configuration of llama-swap", state="nothing was written")
    found = Imported()
    macros = _mapping(document, "macros")
    for name, model in document["models"].items():
        entry_name = entry_name_of(str(name), found.models)
        found.names[str(name)] = entry_name
        if not isinstance(model, dict):
            found.lost.append(f"models.{name}: is no mapping")
            continue
        values = {**macros, **_mapping(model, "macros")}
        model = {**model, "cmd": _without_comments(str(model.get("cmd", "")))}
        whole = _expanded({key: one for key, one in model.items() if key != "macros"}, values, environment)
        found.models[entry_name] = _entry(str(name), entry_name, whole, document, found.lost)
    _add_selectors(document, found)
    _add_peers(document, found)
    _add_matrix(document, found)
    for key in document.keys() - IGNORED - {"macros", "models", "selectors", "peers", "routing", "groups", "matrix"}:
        if key not in ("healthCheckTimeout", "globalTTL"):
            found.lost.append(f"{key}: {SAID.get(key, 'is unknown here')}")
    found.lost.sort()
    return found


def _mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}


def entry_name_of(name: str, taken: Iterable[str]) -> str:
    """Return a name that an entry may have, made of llama-swap's, which is an alias then."""
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:38].strip("-") or "model"
    found, number = short, 2
    while found in taken or not NAME.fullmatch(found):
        found, number = f"{short}-{number}", number + 1
    return found


def _expanded(value: Any, macros: Mapping[str, Any], environment: Mapping[str, str], depth: int = 0) -> Any:
    """Return a value with its macros in place; one that is nothing but a macro has the macro's type."""
    if isinstance(value, dict):
        return {key: _expanded(one, macros, environment, depth) for key, one in value.items()}
    if isinstance(value, list):
        return [_expanded(one, macros, environment, depth) for one in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > MOST_NESTED:
        raise Invalid(f"the macros in {value[:80]!r} contain each other", state="nothing was written")

    def meant(name: str) -> Any:
        if name in OWN:
            return OWN[name]
        if name.startswith("env."):
            return environment.get(name[4:], "${" + name[4:] + "}")
        return macros.get(name, "${" + name + "}") if name == "PID" or name in macros else "${" + name + "}"

    if whole := MACRO.fullmatch(value.strip()):
        found = meant(whole[1])
        return (
            found if not isinstance(found, str) or found == value else _expanded(found, macros, environment, depth + 1)
        )
    text = MACRO.sub(lambda one: str(meant(one[1])), value)
    return text if text == value else _expanded(text, macros, environment, depth + 1)


def _entry(
    name: str, entry_name: str, model: Mapping[str, Any], document: Mapping[str, Any], lost: list[str]
) -> dict[str, Any]:
    def lose(key: str, why: str) -> None:
        lost.append(f"models.{name}.{key}: {why}")

    entry: dict[str, Any] = {}
    words = _words(str(model.get("cmd", "")), lambda why: lose("cmd", why))
    entry |= _of_docker(words, lose) if words[:1] in (["docker"], ["podman"]) else {"command": words}
    aliases = [name] * (entry_name != name) + [str(one) for one in model.get("aliases") or []]
    variables = dict(str(one).split("=", 1) for one in model.get("env") or [] if "=" in str(one))
    if visible := variables.pop("CUDA_VISIBLE_DEVICES", None):
        entry["gpus"] = [int(one) if one.isdigit() else one for one in visible.split(",")]
    entry.setdefault("gpus", ["all"])
    entry["env"] = {**entry.get("env", {}), **variables}
    if port := _port(str(model.get("proxy", "")), lambda why: lose("proxy", why)):
        entry["port"] = port
    check = str(model.get("checkEndpoint", "/health"))
    if check.startswith("/"):
        entry["health"] = check
    else:
        lose("checkEndpoint", f"{check!r} is no path: a model is ready once /health answers")
    ttl = model.get("ttl", -1)
    ttl = document.get("globalTTL", 0) if ttl in (-1, None) else ttl
    entry["idle-timeout"] = ttl
    entry["start-timeout"] = max(15, int(document.get("healthCheckTimeout", HEALTH_SECONDS)))
    if model.get("useModelName"):
        entry["upstream-model"] = str(model["useModelName"])
    if model.get("concurrencyLimit"):
        entry["concurrency"] = int(model["concurrencyLimit"])
    if filters := _filters(_mapping(model, "filters"), lose):
        entry["filters"] = filters
    priorities = _at(document, "routing", "scheduler", "settings", "fifo", "priority")
    if priority := priorities.get(name):
        entry["priority"] = int(priority)
    for key, why in OF_MODEL.items():
        if key in model:
            lose(key, why)
    if not entry["env"]:
        del entry["env"]
    return {**entry, **({"aliases": aliases} if aliases else {})}


def _without_comments(command: str) -> str:
    return "\n".join(line for line in command.split("\n") if not line.lstrip().startswith("#"))


def _words(text: str, lose: Callable[[str], None]) -> list[str]:
    """Return the words of a command."""
    try:
        return shlex.split(" ".join(line.removesuffix("\\") for line in text.split("\n")))
    except ValueError as error:
        lose(f"cannot be split into words: {error}")
        return []


def _of_docker(words: Sequence[str], lose: Callable[[str, str], None]) -> dict[str, Any]:
    """Return image, command, mounts and variables of a `docker run`."""
    entry: dict[str, Any] = {}
    mounts, variables, rest = [], {}, list(words[1:])
    while rest and not rest[0].startswith("-"):
        rest.pop(0)  # run
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in ("-d", "--detach", "--rm", "--init", "-i", "-t", "-it", "--tty", "--interactive"):
            continue
        value = value if equals else rest.pop(0) if rest else ""
        match option:
            case "-v" | "--volume":
                source, _, target = value.partition(":")
                mounts.append(f"{source}:{target.partition(':')[0]}" + ("" if target.endswith(":ro") else ":rw"))
            case "-e" | "--env":
                key, _, one = value.partition("=")
                variables[key] = one or "${" + key + "}"
            case "--gpus":
                found = re.search(r"device=([\w,-]+)", value)
                entry["gpus"] = (
                    [int(one) if one.isdigit() else one for one in found[1].split(",")] if found else ["all"]
                )
            case "-p" | "--publish" if value.rpartition(":")[2] not in value.partition(":")[0]:
                lose("cmd", f"-p {value}: the program has to listen on port {value.rpartition(':')[0]} itself")
            case "--name" | "--network" | "--net" | "--runtime" | "--restart" | "--ipc" | "-p" | "--publish":
                pass
            case _:
                lose("cmd", f"{option} {value}".strip() + " of the container's command")
    if rest:
        entry["image"] = _whole_reference(rest.pop(0))
    if rest:
        entry["command"] = rest
    return {**entry, **({"mounts": mounts} if mounts else {}), **({"env": variables} if variables else {})}


def _whole_reference(image: str) -> str:
    """Return an image's name as containerd wants it: with its registry."""
    host, slash, _ = image.partition("/")
    if not slash:
        return f"docker.io/library/{image}"
    return image if "." in host or ":" in host or host == "localhost" else f"docker.io/{image}"


def _port(proxy: str, lose: Callable[[str], None]) -> int | None:
    if not proxy:
        return None
    try:
        parts = urlsplit(proxy.replace("${PORT}", "1"))
        if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            lose(f"{proxy}: models run on this machine; name that host in `peers`")
        return parts.port if parts.port and parts.port != 1 else None
    except ValueError:
        lose(f"{proxy} is no address")
        return None


def _filters(filters: Mapping[str, Any], lose: Callable[[str, str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if strip := [one.strip() for one in str(filters.get("stripParams", "")).split(",") if one.strip()]:
        found["strip"] = strip
    if override := _mapping(filters, "setParams"):
        found["override"] = override
    if "setParamsByID" in filters:
        lose("filters.setParamsByID", "make an entry of each of these names")
    return found


def _at(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    found: Any = document
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _add_selectors(document: Mapping[str, Any], found: Imported) -> None:
    selectors = {}
    for name, one in _mapping(document, "selectors").items():
        targets = [found.names.get(str(target), str(target)) for target in _mapping({"": one}, "").get("targets") or []]
        strategy = _mapping({"": one}, "").get("strategy")
        known = {*found.models, *(alias for entry in found.models.values() for alias in entry.get("aliases", ()))}
        known |= {str(model) for peer in _mapping(document, "peers").values() for model in peer.get("models", ())}
        if missing := [target for target in targets if target not in known]:
            found.lost.append(f"selectors.{name}: {', '.join(missing)}: there is no such model")
        targets = [target for target in targets if target in known]
        if not targets or strategy not in ("warm", "pin", "spillover"):
            found.lost.append(f"selectors.{name}: its strategy is {strategy}")
            continue
        if strategy == "spillover":
            found.lost.append(f"selectors.{name}.settings: `concurrency` of the models says when one is full")
        selectors[str(name)] = {"choose": "warm", "of": targets[:1]} if strategy == "pin" else {
            "choose": strategy, "of": targets,
        }  # fmt: skip
    if selectors:
        found.rest["selectors"] = selectors


def _add_peers(document: Mapping[str, Any], found: Imported) -> None:
    peers = {}
    for name, one in _mapping(document, "peers").items():
        if not isinstance(one, dict):
            continue
        peers[str(name)] = {
            "url": str(one.get("proxy", "")),
            "models": [str(model) for model in one.get("models") or []],
        }
        for key, why in (
            ("apiKey", "write it into a file and name it in `key_file`"),
            ("filters", "a peer filters by itself"),
            ("timeouts", "the proxy has limits of its own"),
        ):
            if key in one:
                found.lost.append(f"peers.{name}.{key}: {why}")
    if peers:
        found.rest["peers"] = peers


def _add_matrix(document: Mapping[str, Any], found: Imported) -> None:
    """Carry over which models may be loaded together; where nothing says so, sizes decide, which is said."""
    matrix = _at(document, "routing", "router", "settings", "matrix") or _mapping(document, "matrix")
    groups = _at(document, "routing", "router", "settings", "groups") or _mapping(document, "groups")
    if matrix:
        _add_sets(matrix, found)
    elif groups:
        _add_groups(groups, found)
    else:
        found.lost.append("one model at a time: as many are awake as the GPUs have room for; `matrix` says otherwise")


def _add_sets(document: Mapping[str, Any], found: Imported) -> None:
    try:
        matrix = read_matrix(document)
    except MatrixInvalid as error:
        found.lost.append(f"matrix: {error}")
        return
    if missing := sorted(matrix.names - found.names.keys()):
        found.lost.append(f"matrix: {', '.join(missing)}: there is no such model")
    sets = {tuple(sorted(found.names[name] for name in one if name in found.names)) for one in matrix.combinations}
    costs = {found.names[name]: cost for name, cost in matrix.costs.items() if name in found.names}
    if sets - {()}:
        found.rest["matrix"] = _sets(sorted(sets - {()})) | ({"evict_costs": costs} if costs else {})


def _sets(sets: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"sets": {f"set{number}": " & ".join(one) for number, one in enumerate(sets, 1)}}


def _add_groups(groups: Mapping[str, Any], found: Imported) -> None:
    exclusive, together = list[list[list[str]]](), list[list[list[str]]]()
    for name, group in groups.items():
        one = group if isinstance(group, dict) else {}
        members = [found.names[str(member)] for member in one.get("members") or [] if str(member) in found.names]
        if lost := [str(member) for member in one.get("members") or [] if str(member) not in found.names]:
            found.lost.append(f"groups.{name}: {', '.join(lost)}: there is no such model")
        if not members:
            continue
        choices = [[member] for member in members] if one.get("swap", True) else [members]
        (exclusive if one.get("exclusive", True) and not one.get("persistent") else together).append(choices)
        if one.get("persistent"):
            found.lost.append(f"groups.{name}.persistent: give its models `idle-timeout: 0` and a higher `priority`")
    if any(choices for choices in exclusive) and together:
        found.lost.append("groups: an exclusive model lets those of other groups stay that are not exclusive")
    first = [choice for choices in exclusive for choice in choices] or [[]]
    sets = [
        sorted({*one, *(name for choice in rest for name in choice)}) for one in first for rest in product(*together)
    ]
    if len(sets) > MOST_SETS:
        found.lost.append(f"groups: they have {len(sets)} combinations; as many are awake as there is room for")
        return
    found.rest["matrix"] = _sets([one for one in sets if one])
