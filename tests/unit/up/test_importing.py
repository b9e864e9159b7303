"""Files of llama-swap and models of ollama become a models.yaml that is read, and what is lost is named."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kybernate.node.failure import Invalid, Missing, Unavailable
from kybernate.up.importing import from_llama_swap
from kybernate.up.models_file import ModelsFile, Mount, parse
from kybernate.up.ollama import from_ollama

LLAMA_SWAP = """\
healthCheckTimeout: 90
globalTTL: 300
apiKeys: [secret]
macros:
  server: |
    /opt/llama/llama-server --port ${PORT}
  context: 4096
  arguments: --ctx-size ${context}
models:
  Qwen/Big:8b:
    macros: {context: 16384}
    cmd: |
      # ${server} is above
      ${server}
      --model '${env.HOME}/a model.gguf' ${arguments}
    env: [CUDA_VISIBLE_DEVICES=0, NAME=value]
    proxy: http://127.0.0.1:9100
    checkEndpoint: /ready
    ttl: 60
    aliases: [big]
    useModelName: upstream/big
    concurrencyLimit: 3
    filters: {stripParams: 'top_p, top_k', setParams: {temperature: 0.5}}
  small:
    cmd: ${server} -m small.gguf
    checkEndpoint: none
    ttl: 0
    unlisted: true
  image:
    cmd: docker run --rm --gpus '"device=1"' -v /srv/models:/models:ro -e KEY=1 ggml/llama -m /models/x
    cmdStop: docker stop ${MODEL_ID}
selectors:
  any: {strategy: warm, targets: [big, small, gone]}
peers:
  far: {proxy: 'https://far.example', apiKey: k, models: [far-model]}
"""


def imported(tmp_path: Path, text: str, **environment: str) -> tuple[ModelsFile, str]:
    (tmp_path / "config.yaml").write_text(text)
    written = from_llama_swap(tmp_path / "config.yaml", environment).text("config.yaml")
    return parse(written, "models.yaml", {}), written


def test_models_of_llama_swap_are_carried_over(tmp_path: Path) -> None:
    file, text = imported(tmp_path, LLAMA_SWAP, HOME="/root")
    big, small, image = file.models
    assert (big.name, big.aliases, big.port) == ("qwen-big-8b", ("Qwen/Big:8b", "big"), 9100)
    assert big.command == (
        *("/opt/llama/llama-server", "--port", "9100", "--model", "/root/a model.gguf", "--ctx-size", "16384"),
    )
    assert (big.idle, big.start_timeout, big.health, big.concurrency) == (60.0, 90.0, "/ready", 3)
    assert (big.upstream_model, big.environment["NAME"], big.devices) == (
        "upstream/big",
        "value",
        ("nvidia.com/gpu=0",),
    )
    assert (big.filters.strip, big.filters.override) == (("top_p", "top_k"), {"temperature": 0.5})
    assert (small.idle, small.health, small.devices) == (0.0, "/health", ("nvidia.com/gpu=all",))
    assert (image.image, image.command) == ("docker.io/ggml/llama", ("-m", "/models/x"))
    assert (image.mounts, image.environment["KEY"]) == ((Mount("/srv/models", "/models"),), "1")
    assert (image.idle, image.devices) == (300.0, ("nvidia.com/gpu=1",))
    assert file.selectors[0].of == ("big", "small")
    assert file.peers[0].models == ("far-model",)
    for lost in (
        "apiKeys: write",
        "models.small.checkEndpoint: 'none' is no path",
        "models.small.unlisted: all",
        "models.image.cmdStop: the container",
        "peers.far.apiKey: write",
        "selectors.any: gone: there is no such model",
        "one model at a time: ",
    ):
        assert f"#   {lost}" in text


def test_matrix_of_llama_swap_is_kept_as_far_as_its_models_are_there(tmp_path: Path) -> None:
    models = "models: {a: {cmd: a}, b/1: {cmd: b}, c: {cmd: c}}\n"
    matrix = "matrix: {vars: {x: b/1}, evict_costs: {x: 9}, sets: {one: '(a | gone) & x', two: c}}"
    file, text = imported(tmp_path, f"{models}routing: {{router: {{settings: {{{matrix}}}}}}}\n")
    assert file.matrix is not None
    assert file.matrix.allows(["a", "b-1"])
    assert not file.matrix.allows(["a", "c"])
    assert file.matrix.cost("b-1") == 9
    assert "matrix: gone: there is no such model" in text


def test_groups_of_llama_swap_are_combinations(tmp_path: Path) -> None:
    models = "models: {a: {cmd: a}, b: {cmd: b}, c: {cmd: c}, d: {cmd: d}}\n"
    groups = (
        "groups: {one: {swap: true, exclusive: true, members: [a, b]}, two: {swap: false, members: [c]},"
        " always: {persistent: true, swap: false, exclusive: false, members: [d]}}\n"
    )
    file, text = imported(tmp_path, models + groups)
    assert file.matrix is not None
    assert file.matrix.to_evict("a", ["b", "d"]) == {"b"}
    assert file.matrix.to_evict("c", ["a", "d"]) == {"a"}
    assert "groups.always.persistent" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "cannot be read"),
        ("listen: x", "has no `models`"),
        ("macros: {a: '${b}', b: '${a}'}\nmodels: {m: {cmd: '${a}'}}", "contain each other"),
    ],
)
def test_file_that_is_none_of_llama_swap_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(Invalid, match=said):
        from_llama_swap(tmp_path / "config.yaml", {})


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models directory of ollama."""
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc"},
        {"mediaType": "application/vnd.ollama.image.system", "digest": "sha256:def"},
    ]
    for place in ("registry.ollama.ai/library/qwen3/8b", "registry.ollama.ai/me/mine/latest"):
        path = tmp_path / "manifests" / place
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"layers": layers}))
    (tmp_path / "manifests/registry.ollama.ai/library/qwen3/broken").write_text('{"layers": [{"digest": "../x"}]}')
    return tmp_path


def test_models_of_ollama_are_entries_for_llama_server(models: Path) -> None:
    found = from_ollama({"OLLAMA_MODELS": str(models)}, llama_server="/usr/bin/llama-server", ollama="")
    file = parse(found.text("ollama"), "models.yaml", {})
    one, two = file.models
    assert (one.name, one.aliases) == ("qwen3-8b", ("qwen3:8b",))
    assert (two.name, two.aliases) == ("me-mine-latest", ("me/mine:latest", "me/mine"))
    assert f"{models}/blobs/sha256-abc" in one.command
    assert any(line.startswith("qwen3:broken: its manifest cannot be read") for line in found.lost)
    assert any("system of its Modelfile" in line for line in found.lost)


def test_models_of_ollama_are_entries_for_ollama_without_llama_server(models: Path) -> None:
    found = from_ollama({"OLLAMA_MODELS": str(models)}, llama_server="", ollama="/usr/bin/ollama")
    one = parse(found.text("ollama"), "models.yaml", {}).models[0]
    assert one.command == ("/usr/bin/ollama", "serve")
    assert one.environment["OLLAMA_HOST"] == f"127.0.0.1:{one.port}"
    assert one.warm_up is not None


def test_ollama_without_a_directory_is_asked(tmp_path: Path) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"models": [{"name": "llama3:latest"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    environment = {"OLLAMA_HOST": f"127.0.0.1:{server.server_port}", "OLLAMA_MODELS": str(tmp_path)}
    found = from_ollama(environment, llama_server="", ollama="/usr/bin/ollama")
    server.shutdown()
    server.server_close()
    assert parse(found.text("ollama"), "m.yaml", {}).models[0].aliases == ("llama3:latest", "llama3")
    with pytest.raises(Unavailable, match="does not answer"):
        from_ollama(environment, llama_server="", ollama="/usr/bin/ollama")
    with pytest.raises(Missing):
        from_ollama(environment, llama_server="", ollama="")
