"""Bodies that name a model in odd ways: each plane finds the one that the model itself may find, or none."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kybernate.proxy.haproxy.generated import ACTIVATOR
from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import Stand
from tests.contract.proxy.test_smuggling import Raw, raw_upstream

# Two models, so that it is seen which one a body was taken for.
QWEN, OTHER = "one", "two"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def deep(count: int) -> bytes:
    return b'{"a":' + b'[{"b":' * count + b"1" + b"}]" * count + b',"model":"one"}'


# The body, and which models it may be passed to; "" stands for a refusal by 400 or 404.
JSON: dict[str, tuple[bytes, set[str]]] = {
    "twice": (b'{"model":"one","model":"two"}', {QWEN, ""}),
    "twice, escaped": (b'{"mod\\u0065l":"one","model":"two"}', {QWEN}),
    "escaped key": (b'{"\\u006dodel":"one"}', {QWEN}),
    "escaped value": (b'{"model":"o\\u006ee"}', {QWEN}),
    "in an object before": (b'{"a":{"model":"two"},"model":"one"}', {QWEN}),
    "in a list before": (b'{"a":[{"model":"two"}],"model":"one"}', {QWEN}),
    "in a text before": (b'{"a":"\\"model\\":\\"two\\"","model":"one"}', {QWEN}),
    "behind a backslash": (b'{"a":"\\\\","model":"one"}', {QWEN}),
    "key with a space": (b'{"model ":"two","model":"one"}', {QWEN}),
    "two capitals": (b'{"Model":"two","model":"one"}', {QWEN}),
    "byte order mark": (b'\xef\xbb\xbf{"model":"one"}', {QWEN, ""}),
    "UTF-16": ('{"model":"one"}'.encode("utf-16"), {""}),
    "UTF-16 without a mark": ('{"model":"one"}'.encode("utf-16-le"), {""}),
    "UTF-32": ('{"model":"one"}'.encode("utf-32"), {""}),
    "zero byte in the value": (b'{"model":"one\x00"}', {""}),
    "escaped zero in the value": (b'{"model":"one\\u0000"}', {""}),
    "half of a surrogate": (b'{"model":"\\ud800one"}', {""}),
    "no UTF-8": (b'{"model":"one\xff"}', {""}),
    "number": (b'{"model":1}', {""}),
    "enormous number before": (b'{"a":1' + b"0" * 5000 + b',"model":"one"}', {QWEN}),
    "enormous exponent": (b'{"a":1e999999,"model":"one"}', {QWEN}),
    "not a number": (b'{"a":NaN,"b":-Infinity,"model":"one"}', {QWEN, ""}),
    "null": (b'{"model":null}', {""}),
    "list": (b'{"model":["one"]}', {""}),
    "object": (b'{"model":{"model":"one"}}', {""}),
    "top is a list": (b'[{"model":"one"}]', {""}),
    "top is a text": (b'"{\\"model\\":\\"one\\"}"', {""}),
    "something behind": (b'{"model":"one"}{"model":"two"}', {QWEN, ""}),
    "something before": (b'x{"model":"one"}', {""}),
    "comment": (b'/* {"model":"two"} */{"model":"one"}', {QWEN, ""}),
    "single quotes": (b"{'model':'one'}", {""}),
    "no quotes": (b"{model:one}", {""}),
    "comma at the end": (b'{"model":"one",}', {QWEN, ""}),
    "cut off": (b'{"model":"one"', {QWEN, ""}),
    "cut off in the name": (b'{"model":"qw', {""}),
    "deep": (deep(10_000), {QWEN, ""}),
    "deep, never closed": (b'{"a":' + b"[" * 30_000, {""}),
    "many keys": (b"{" + b"".join(b'"k%d":1,' % number for number in range(2000)) + b'"model":"one"}', {QWEN}),
    "key of 100 KiB": (b'{"' + b"k" * 100_000 + b'":1,"model":"one"}', {QWEN, ""}),
    "line feeds between": (b'\n\n{\r\n\t"model"\n:\t"one"\r}', {QWEN}),
    "empty": (b"", {""}),
    "name with a space": (b'{"model":" one"}', {""}),
    "name of a path": (b'{"model":"../one"}', {""}),
    "compressed": (gzip.compress(b'{"model":"one"}'), {""}),
}


async def post(stand: Stand, body: bytes, *headers: str) -> bytes:
    head = [
        "POST /v1/chat/completions HTTP/1.1", "Host: h", "Connection: close", f"Content-Length: {len(body)}", *headers,
    ]  # fmt: skip
    return await asyncio.wait_for(stand.raw("\r\n".join([*head, "", ""]).encode() + body), 20)


@asynccontextmanager
async def two_models(standing_proxy: Standing) -> AsyncIterator[tuple[Stand, dict[str, Raw]]]:
    """Models whose upstreams read no JSON, which would refuse some of it, but keep what they get."""
    async with raw_upstream(OK) as (first, port), raw_upstream(OK) as (second, other):
        more = f"  {QWEN}: {{upstream: 'http://127.0.0.1:{port}'}}\n  {OTHER}: {{upstream: 'http://127.0.0.1:{other}'}}"
        async with standing_proxy(f"{more}\n", phase=Phase.AWAKE) as stand:
            plane = stand.service.plane
            names = (QWEN, OTHER)
            await stand.until(lambda: plane is None or all(plane._wanted[name] != ACTIVATOR for name in names))
            yield stand, {QWEN: first, OTHER: second}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
async def test_json_that_names_a_model_in_an_odd_way_reaches_no_other(standing_proxy: Standing, chunked: bool) -> None:
    """With its length HAProxy reads it, in chunks the embedded plane does, for both planes."""
    wrong = {}
    async with two_models(standing_proxy) as (stand, models):
        for name, (body, allowed) in JSON.items():
            answer = await (post_chunks if chunked else post)(stand, body, "Content-Type: application/json")
            reached = [model for model, raw in models.items() if raw.got]
            status = answer.split(b" ")[1] if answer else b""
            refused = not reached and status in (b"400", b"404", b"413")
            if not (refused and "" in allowed) and not (len(reached) == 1 and reached[0] in allowed):
                wrong[name] = (reached, answer[:160])
            for model, raw in models.items():
                assert model in reached or not raw.got
                assert not raw.got or chunked or raw.got.endswith(body)
                raw.got.clear()
    assert not wrong, list(wrong)


async def post_chunks(stand: Stand, body: bytes, *headers: str) -> bytes:
    head = [
        "POST /v1/chat/completions HTTP/1.1", "Host: h", "Connection: close", "Transfer-Encoding: chunked", *headers,
    ]  # fmt: skip
    pieces = [body[at : at + 7] for at in range(0, min(len(body), 700), 7)] + ([body[700:]] if len(body) > 700 else [])
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return await asyncio.wait_for(stand.raw("\r\n".join([*head, "", ""]).encode() + framed + b"0\r\n\r\n"), 20)


# Forms, whose boundary and parts are written in odd ways. What follows is the boundary, then the body.
PART = b'Content-Disposition: form-data; name="model"\r\n\r\n'
FORMS: dict[str, tuple[str, bytes, set[str]]] = {
    "plain": ("b", b"--b\r\n" + PART + b"one\r\n--b--\r\n", {QWEN}),
    "quoted boundary": ('"b b"', b"--b b\r\n" + PART + b"one\r\n--b b--\r\n", {QWEN}),
    "preamble": ("b", b"two\r\n--b\r\n" + PART + b"one\r\n--b--\r\n", {QWEN}),
    "epilogue": ("b", b"--b\r\n" + PART + b"one\r\n--b--\r\n--b\r\n" + PART + b"two\r\n--b--", {QWEN}),
    "twice": ("b", b"--b\r\n" + PART + b"one\r\n--b\r\n" + PART + b"two\r\n--b--", {QWEN, ""}),
    "boundary inside a value": ("b", b"--b\r\n" + PART + b"one--b\r\n--b--", {""}),
    "longer boundary": ("b", b"--bb\r\n" + PART + b"two\r\n--b\r\n" + PART + b"one\r\n--b--", {QWEN, ""}),
    "longer boundary in a value": ("b", b"--b\r\n" + PART + b"two\r\n--bb\r\n--b--", {""}),
    "spaces behind the boundary": ("b", b"--b \t\r\n" + PART + b"one\r\n--b\t\r\n", {QWEN}),
    "two hyphens that end it": ("b", b"--b--\r\n" + PART + b"two\r\n--b--", {""}),
    "name in a file": (
        "b", b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\ntwo\r\n--b\r\n' + PART
        + b"one\r\n--b--", {QWEN},
    ),
    "form in a file": (
        "b", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n--c\r\n' + PART + b"two\r\n--c--\r\n--b\r\n"
        + PART + b"one\r\n--b--", {QWEN},
    ),
    "line feeds alone": ("b", (b"--b\r\n" + PART + b"two\r\n--b--").replace(b"\r\n", b"\n"), {""}),
    "no boundary": ("", b"--\r\n" + PART + b"two\r\n----", {""}),
    "enormous boundary": ("b" * 5000, b"--" + b"b" * 5000 + b"\r\n" + PART + b"two\r\n", {""}),
    "boundary that is no ASCII": ("\xe4", b"--\xe4\r\n" + PART + b"two\r\n--\xe4--", {""}),
    "never ended": ("b", b"--b\r\n" + PART + b"o", {""}),
    "head without an end": ("b", b"--b\r\n" + b"X-A: b\r\n" * 2000, {""}),
    "folded name": (
        "b", b'--b\r\nContent-Disposition: form-data;\r\n name="model"\r\n\r\none\r\n--b--', {QWEN, ""},
    ),
    "name twice": (
        "b", b'--b\r\nContent-Disposition: form-data; name="file"; name="model"\r\n\r\ntwo\r\n--b--', {""},
    ),
    "empty": ("b", b"", {""}),
}  # fmt: skip


async def test_form_that_names_a_model_in_an_odd_way_reaches_no_other(standing_proxy: Standing) -> None:
    wrong = {}
    async with two_models(standing_proxy) as (stand, models):
        for name, (boundary, body, allowed) in FORMS.items():
            answer = await post(stand, body, f"Content-Type: multipart/form-data; boundary={boundary}")
            reached = [model for model, raw in models.items() if raw.got]
            status = answer.split(b" ")[1] if answer else b""
            refused = not reached and status in (b"400", b"404", b"413", b"431")
            if not (refused and "" in allowed) and not (len(reached) == 1 and reached[0] in allowed):
                wrong[name] = (reached, answer[:160])
            for raw in models.values():
                raw.got.clear()
    assert not wrong, list(wrong)
