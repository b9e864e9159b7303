"""Settings of the proxy: what is read, and where mistakes are reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.node.failure import Invalid
from kybernate.proxy.settings import Queue, parse

WHOLE = """
listen: 0.0.0.0:8080
admin: "[::1]:9464"
plane: haproxy
trusted: [10.0.0.0/8]
models:
  qwen:
    container: ns/qwen
    upstream: http://127.0.0.1:8001
    aliases: [gpt-4o]
    concurrency: 32
    queue: {count: 10, bytes: 1MiB, age: 2m}
    idle: 5m
    filters: {set: {n: 1}, strip: seed, override: {stop: [a, null]}}
    probes: [{path: /healthz}]
selectors:
  any: {choose: weights, of: [qwen, far], weights: [9, 1]}
peers:
  lab: {url: https://lab.example/api, models: [far]}
routes:
  - {host: A.example, path: /x, headers: {X-Team: red}, to: any, quota: 60}
tcp: [{listen: 127.0.0.1:5432, to: qwen, wake_on: data}]
haproxy: {global: [maxconn 100], backends: {qwen: [timeout server 1h]}}
"""


def test_whole_document_is_read() -> None:
    found = parse(WHOLE)
    (model,) = found.models
    assert (found.listen, found.admin, found.plane) == (("0.0.0.0", 8080), ("::1", 9464), "haproxy")
    assert (model.queue, model.idle, model.aliases) == (Queue(10, 1 << 20, 120.0), 300.0, ("gpt-4o",))
    assert (model.filters.strip, model.filters.override) == (("seed",), {"stop": ["a", None]})
    assert found.routes[0].hosts == ("a.example",)
    assert found.routes[0].headers == {"x-team": "red"}
    assert found.haproxy.extra_backends == {"qwen": ("timeout server 1h",)}


def test_empty_document_is_valid() -> None:
    assert parse("").listen == ("127.0.0.1", 8080)


MISTAKES = {
    "models:\n  a: {upstream: 'ftp://x'}": "2:17: models.a.upstream must be an address",
    "models:\n  a: {}": "2:6: models.a needs the key upstream",
    "models:\n  a: {upstream: 'http://h', idel: 5}": "2:35: models.a.idel is unknown; the keys here are aliases",
    "listen: nowhere": "1:9: listen must be HOST:PORT",
    "listen: a:1\nlisten: b:2": "2:1: listen is given twice",
    "models: [a]": "1:9: models must be a mapping",
    "models:\n  a: {upstream: 'http://h', idle: soon}": "models.a.idle must be a time",
    "models:\n  a: {upstream: 'http://h', queue: {bytes: 3 cats}}": "models.a.queue.bytes must be a size",
    "selectors:\n  s: {choose: warm, of: [none]}": "2:6: selectors.s.of: no model is called none",
    "selectors:\n  s: {choose: best, of: []}": "must be one of warm, spillover, weights",
    "routes: [{to: none}]": "routes: to: no model or selector is called none",
    "models:\n  a: {upstream: 'http://h', aliases: [b]}\n  b: {upstream: 'http://h'}": "b is a name of a and of b",
    "agent: {ca: /a}": "1:8: agent needs ca, certificate and key, or none",
    "listen: {a: [}": "1:14:",
    "trusted: [10.0.0.1/8]": "1:10: trusted 10.0.0.1/8 has host bits set",
    "models:\n  a: {upstream: 'http://h', aliases: [1]}": "models.a.aliases must be a text",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistake_is_reported_with_its_place(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(text, "proxy.yaml")
    assert MISTAKES[text] in str(caught.value)
    assert all(line.startswith("proxy.yaml:") for line in str(caught.value).split("\n"))


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        parse("listen: x\nplane: y\nnonsense: z")
    assert [line.split(":")[1] for line in str(caught.value).split("\n")] == ["1", "2", "3"]


@given(st.text(max_size=200))
def test_any_text_is_settings_or_a_mistake(text: str) -> None:
    try:
        parse(text)
    except Invalid:
        pass


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["models", "listen", "routes", "to", "upstream", "queue", "tcp", "a"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_structure_is_settings_or_a_mistake(value: object) -> None:
    import json

    try:
        parse(json.dumps(value))
    except Invalid:
        pass
