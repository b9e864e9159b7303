"""Bodies that name a model in odd ways: both planes find the same one, or none; no one finds another than the model does."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator

import pytest

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import Stand

# Two models, so that it is seen which one a body was taken for: `secret` has a route of its own in no test.
MODELS = "  other: {upstream: 'http://127.0.0.1:{port}', upstream_model: was-other}\n"
QWEN, OTHER = "qwen", "was-other"


def deep(count: int) -> bytes:
    return b'{"a":' + b'[{"b":' * count + b"1" + b"}]" * count + b',"model":"qwen"}'


# The body, and which models it may be passed to; "" stands for a refusal by 400 or 404.
JSON: dict[str, tuple[bytes, set[str]]] = {
    "twice": (b'{"model":"qwen","model":"other"}', {QWEN, ""}),
    "twice, escaped": (b'{"mod\\u0065l":"qwen","model":"other"}', {QWEN, ""}),
    "escaped key": (b'{"\\u006dodel":"qwen"}', {QWEN, ""}),
    "escaped value": (b'{"model":"q\\u0077en"}', {QWEN, ""}),
    "in an object before": (b'{"a":{"model":"other"},"model":"qwen"}', {QWEN}),
    "in a list before": (b'{"a":[{"model":"other"}],"model":"qwen"}', {QWEN}),
    "in a text before": (b'{"a":"\\"model\\":\\"other\\"","model":"qwen"}', {QWEN}),
    "behind a backslash": (b'{"a":"\\\\","model":"qwen"}', {QWEN}),
    "key with a space": (b'{"model ":"other","model":"qwen"}', {QWEN}),
    "other capitals": (b'{"Model":"other","model":"qwen"}', {QWEN}),
    "byte order mark": (b'\xef\xbb\xbf{"model":"qwen"}', {QWEN, ""}),
    "UTF-16": ('{"model":"qwen"}'.encode("utf-16"), {""}),
    "UTF-16 without a mark": ('{"model":"qwen"}'.encode("utf-16-le"), {""}),
    "UTF-32": ('{"model":"qwen"}'.encode("utf-32"), {""}),
    "zero byte in the value": (b'{"model":"qwen\x00"}', {""}),
    "escaped zero in the value": (b'{"model":"qwen\\u0000"}', {""}),
    "half of a surrogate": (b'{"model":"\\ud800qwen"}', {""}),
    "no UTF-8": (b'{"model":"qwen\xff"}', {""}),
    "number": (b'{"model":1}', {""}),
    "enormous number before": (b'{"a":1' + b"0" * 5000 + b',"model":"qwen"}', {QWEN}),
    "enormous exponent": (b'{"a":1e999999,"model":"qwen"}', {QWEN}),
    "not a number": (b'{"a":NaN,"b":-Infinity,"model":"qwen"}', {QWEN, ""}),
    "null": (b'{"model":null}', {""}),
    "list": (b'{"model":["qwen"]}', {""}),
    "object": (b'{"model":{"model":"qwen"}}', {""}),
    "top is a list": (b'[{"model":"qwen"}]', {""}),
    "top is a text": (b'"{\\"model\\":\\"qwen\\"}"', {""}),
    "something behind": (b'{"model":"qwen"}{"model":"other"}', {QWEN, ""}),
    "something before": (b'x{"model":"qwen"}', {""}),
    "comment": (b'/* {"model":"other"} */{"model":"qwen"}', {QWEN, ""}),
    "single quotes": (b"{'model':'qwen'}", {""}),
    "no quotes": (b"{model:qwen}", {""}),
    "comma at the end": (b'{"model":"qwen",}', {QWEN, ""}),
    "cut off": (b'{"model":"qwen"', {QWEN, ""}),
    "cut off in the name": (b'{"model":"qw', {""}),
    "deep": (deep(10_000), {QWEN, ""}),
    "deep, never closed": (b'{"a":' + b"[" * 30_000, {""}),
    "many keys": (b"{" + b"".join(b'"k%d":1,' % number for number in range(2000)) + b'"model":"qwen"}', {QWEN}),
    "key of 100 KiB": (b'{"' + b"k" * 100_000 + b'":1,"model":"qwen"}', {QWEN, ""}),
    "line feeds between": (b'\n\n{\r\n\t"model"\n:\t"qwen"\r}', {QWEN}),
    "empty": (b"", {""}),
    "name with a space": (b'{"model":" qwen"}', {""}),
    "name of a path": (b'{"model":"../qwen"}', {""}),
    "compressed": (gzip.compress(b'{"model":"qwen"}'), {""}),
}


def to(stand: Stand, before: int) -> str:
    """Return which model has got a request since `before`, "" for none."""
    got = stand.upstream.seen[before:]
    assert len(got) <= 1
    if not got:
        return ""
    return OTHER if OTHER.encode() in got[0]["body"] else QWEN


async def post(stand: Stand, body: bytes, *headers: str) -> bytes:
    head = [
        "POST /v1/chat/completions HTTP/1.1", "Host: h", "Connection: close", f"Content-Length: {len(body)}", *headers,
    ]  # fmt: skip
    return await asyncio.wait_for(stand.raw("\r\n".join([*head, "", ""]).encode() + body), 20)


async def test_json_that_names_a_model_in_an_odd_way_reaches_no_other(standing_proxy: Standing) -> None:
    """The upstream reads no JSON here, since it would refuse some of it."""
    wrong = {}
    async with standing_proxy(MODELS, phase=Phase.AWAKE) as stand:
        for name, (body, allowed) in JSON.items():
            before = len(stand.upstream.seen)
            answer = await post(stand, body, "Content-Type: application/x.json")
            found = to(stand, before)
            status = answer.split(b" ")[1] if answer else b""
            if found not in allowed or (not found and status not in (b"400", b"404", b"413")):
                wrong[name] = (found, answer[:200])
    assert not wrong
