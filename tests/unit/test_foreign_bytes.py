"""Bytes that others choose are decoded in few places, each of which bounds their size and nesting.

The table below has every place in the code that decodes JSON, TOML, protobuf or tar by itself, with the reason why that
is safe there. A new one fails the first test until it uses bounded_json, or gets a row.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.export import answers, archives, cri_documents, documents
from kybernate.export.credentials import credentials_for
from kybernate.export.documents import ArtefactInvalid
from kybernate.export.guard import CONTENT, MOST_ANSWER, Guard
from kybernate.node import importing
from kybernate.node.failure import Failure, Invalid
from kybernate.node.specs import spec_of
from kybernate.registry import beside, queries
from kybernate.registry.model import Filter
from kybernate.store import header, lease, notes
from kybernate.store.errors import StoreInvalid
from kybernate.store.format import recipe
from kybernate.store.keys import StoreKey
from kybernate.store.objects import Stored
from kybernate.store.simulation import traces
from kybernate_shim import bounded_json
from kybernate_shim.checkpoint import names
from kybernate_shim.checkpoint.image import manifest
from kybernate_shim.checkpoint.image.digests import FileUnreadable
from kybernate_shim.checkpoint.image.store import CheckpointInvalid
from tests.unit.store.stepped import SteppedObjects

ROOT: Final = Path(__file__).parents[2]
DECODERS: Final = frozenset(
    {
        "json.loads", "json.load", "json.JSONDecoder", "tomllib.loads", "tomllib.load", "tarfile.open", "pickle.loads",
        "pickle.load", "marshal.loads", "msgspec.msgpack.decode", "msgspec.json.decode",
    }
)  # fmt: skip
METHODS: Final = frozenset({"FromString", "ParseFromString", "MergeFromString", "json"})  # of protobuf, and of httpx
OWN: Final = "bytes that this program wrote, in files or rows that only root can write"
CONTAINERD: Final = "containerd's own file or request, of which a pod's author chooses texts and no structure"
FRAMES: Final = "a frame of at most 4 MiB; protobuf itself refuses more than 100 messages in each other"
OPERATOR: Final = "the operator's own file"
READS: Final = {
    "kybernate_shim/bounded_json.py": "the decoder with limits",
    "kybernate_shim/address.py": CONTAINERD,
    "kybernate_shim/arena/banks.py": OWN,
    "kybernate_shim/arena/records.py": OWN,
    "kybernate_shim/checkpoint/at_rest.py": "headers are bounded by rootfs/apply.py",
    "kybernate_shim/checkpoint/criu/kept_ipc.py": "entries are bounded; of an image that is signed, or was just dumped",
    "kybernate_shim/checkpoint/criu/images.py": "entries are bounded; a process with limits reads them",
    "kybernate_shim/checkpoint/dump_manifest.py": "runc's own file, bounded, of which anything odd is passed over",
    "kybernate_shim/checkpoint/loopback.py": "runc's own request to a hook",
    "kybernate_shim/checkpoint/rootfs/apply.py": "headers are bounded as they are read",
    "kybernate_shim/config/reading.py": OPERATOR,
    "kybernate_shim/gpu/claims.py": OWN,
    "kybernate_shim/info.py": CONTAINERD,
    "kybernate_shim/oci/bundle.py": CONTAINERD,
    "kybernate_shim/oci/log.py": "the end of runc's own log, bounded, of which anything odd is passed over",
    "kybernate_shim/oci/options.py": CONTAINERD,
    "kybernate_shim/oci/spec.py": CONTAINERD,
    "kybernate_shim/ttrpc/client.py": FRAMES,
    "kybernate_shim/ttrpc/connection.py": FRAMES,
    "kybernate_shim/ttrpc/methods.py": FRAMES,
    "kybernate/agent/events/store.py": OWN,
    "kybernate/agent/inventory/notices.py": "an event of containerd's, as large as gRPC allows; DecodeError is caught",
    "kybernate/agent/operations/store.py": OWN,
    "kybernate/agent/parts/seats.py": "an event of containerd's, as large as gRPC allows; DecodeError is caught",
    "kybernate/client/errors.py": "metadata of 8 KiB at most; DecodeError is caught",
    "kybernate/client/queries.py": "an answer of the agent's, as large as the channel lets it be",
    "kybernate/export/archives.py": "headers are bounded as they are read",
    "kybernate/client/contexts.py": OPERATOR,
    "kybernate/install/containerd.py": OPERATOR,
    "kybernate/node/containerd_facts.py": OPERATOR,
    "kybernate/registry/migrations/versions/r0002_revisions.py": OWN,
    "kybernate/store/simulation/traces.py": OPERATOR,
    "kybernate/up/pods.py": OWN,
}


def decoders_in(path: Path) -> Iterator[int]:
    """Yield the lines at which a module decodes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in DECODERS or (node.attr in METHODS and name not in ("msgspec.json",)):
                yield node.lineno


def modules() -> Iterator[Path]:
    for package in ("kybernate", "kybernate_shim"):
        yield from (path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def test_each_decoder_is_bounded_or_has_its_reason() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in modules() if (lines := sorted(decoders_in(path)))}
    assert {name: lines for name, lines in found.items() if name not in READS} == {}, "decode with bounded_json"
    assert READS.keys() - found.keys() == set(), "these decode nothing any more"


def test_decoder_that_is_not_listed_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import json\nread = json.loads\ndef f(a): return a.FromString(b'')\n")
    assert sorted(decoders_in(tmp_path / "module.py")) == [2, 3]


# ---- each reader of foreign JSON

KEY: Final = StoreKey(b"k" * 32)
NESTED: Final = {
    "deeper than the stack": b"[" * 100_000,
    "whole, and deeper than accepted": b"[" * 200 + b"]" * 200,
    "in an object": b'{"id": ' * 200 + b"1" + b"}" * 200,
    "many": b"[" + b"1," * 3_000_000 + b"1]",
    "no JSON": b"\xff\xfe{",
    "cut": b'{"id": "',
    "number": b"[" + b"9" * 5000 + b"]",
}


def get(name: str, read: Callable[[SteppedObjects], Any]) -> Callable[[bytes, Path], Any]:
    """Return what reads an object of a store with that content."""

    def work(content: bytes, directory: Path) -> Any:
        objects = SteppedObjects()
        objects.contents[name] = (content, 1.0)
        return asyncio.run(read(objects))

    return work


def sealed(content: bytes, directory: Path) -> None:
    """Read a recipe that another holder of the store's key has made."""
    recipe.decode(KEY, content + b"\n" + recipe._mac(KEY, content))


def in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    def work(content: bytes, directory: Path) -> Any:
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o600)
        return read(directory)

    return work


async def note_of(objects: SteppedObjects) -> None:
    (note,) = await notes.read(objects)
    if note.problem:
        raise StoreInvalid(note.problem)


def page_of(content: bytes, directory: Path) -> None:
    import base64

    text = content.decode("latin-1")
    body = queries._check(text, Filter()) + text
    queries.position_of(base64.b64encode(body.encode(), altchars=b"-_").decode().rstrip("="), Filter())


READERS: Final[dict[str, tuple[Callable[[bytes, Path], Any], type[Exception]]]] = {
    "header": (get(header.NAME, lambda objects: header.check(objects, KEY)), StoreInvalid),
    "note": (get("condemned/1", note_of), StoreInvalid),
    "recipe": (sealed, StoreInvalid),
    "manifest": (lambda content, directory: manifest.decode(content), manifest.ManifestInvalid),
    "names": (in_file(names.FILE, names.read), CheckpointInvalid),
    "registry's file": (lambda content, directory: beside.decode(content), ValueError),
    "row": (lambda content, directory: beside.decode_annotations(content.decode("latin-1")), ValueError),
    "spec": (lambda content, directory: importing._parsed(content), FileUnreadable),
    "document of a registry": (lambda content, directory: documents.chosen(content), ArtefactInvalid),
    "credentials": (
        in_file("config.json", lambda directory: credentials_for("h", directory / "config.json")),
        Failure,
    ),
    "page": (page_of, Invalid),
    "trace": (
        lambda content, directory: list(traces._json_lines([content.decode("latin-1")], 1)),
        ValueError,
    ),
}


@pytest.mark.parametrize("content", NESTED.values(), ids=NESTED.keys())
@pytest.mark.parametrize(("read", "error"), READERS.values(), ids=READERS.keys())
def test_foreign_bytes_are_refused_in_words(
    read: Callable[[bytes, Path], Any], error: type[Exception], content: bytes, tmp_path: Path
) -> None:
    with pytest.raises(error):
        read(content, tmp_path)


@pytest.mark.parametrize("content", NESTED.values(), ids=NESTED.keys())
def test_what_is_passed_over_ends_nothing(content: bytes) -> None:
    from kybernate.messages import containers_pb2

    record = containers_pb2.Container(id="c")
    record.spec.value = content
    assert dict(spec_of(record)) == {}
    assert dict(cri_documents._parsed(content)) == {}
    objects = SteppedObjects()
    objects.contents["writers/1"] = (content, objects.clock)
    asyncio.run(lease.living(objects, objects.clock))


def test_object_of_gigabytes_is_refused_before_it_is_read() -> None:
    class Huge(SteppedObjects):
        async def list(self, prefix: str) -> Any:
            yield Stored("images/team/1", 7 << 30, 1.0)

        async def get(self, name: str, *, most: int = 0) -> bytes:
            assert 0 < most < 1 << 30, f"{name} is read whole"
            raise StoreInvalid(f"{name} has {7 << 30} bytes; at most {most} are read")

    async def scenario() -> None:
        from kybernate.store.chunkstore import ChunkStore

        broken: dict[str, str] = {}
        store = ChunkStore(Huge(), KEY)
        assert [one async for one in store.recipes(broken=broken.__setitem__)] == []
        assert list(broken) == ["images/team/1"]

    asyncio.run(scenario())


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.integers(0, 8))
def test_json_is_what_it_is_up_to_its_depth(value: Any, most: int) -> None:
    def depth(one: Any) -> int:
        inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    content = json.dumps(value)
    if depth(value) <= most:
        assert bounded_json.parse(content, most_nested=most) == value
        assert bounded_json.parse(content.encode(), most_nested=most) == value
    else:
        with pytest.raises(ValueError, match="nested more than"):
            bounded_json.parse(content, most_nested=most)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_no_json(content: bytes) -> None:
    try:
        bounded_json.parse(content)
    except ValueError:
        pass
    with pytest.raises(ValueError, match="bytes, at most"):
        bounded_json.parse(b" " * 41, most_bytes=40)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE])
@pytest.mark.parametrize("read", [archives.manifest_in, lambda path: archives.unpack(path, path.parent / "out")])
def test_header_of_gigabytes_is_not_read(
    read: Callable[[Path], Any], kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive has a hole where the header's bytes belong, so reading them would give gigabytes."""
    monkeypatch.setattr(archives, "require_space", lambda directory, needed: None)
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, 6 << 30
    path = tmp_path / "image.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, (6 << 30) + 10 * tarfile.BLOCKSIZE)
    tracemalloc.start()
    try:
        with pytest.raises(archives.Failure, match=r"at most 65536|is neither a plain file"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


class IteratorByteStream(httpx.SyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces


GUARD: Final = Guard(httpx.URL("https://registry"))
GZIP: Final = {"Content-Encoding": "gzip"}
ANSWERS: Final = {
    "long": (httpx.Response(500, stream=IteratorByteStream([b" " * (1 << 20)] * 20)), "Expecting value"),
    "compressed": (httpx.Response(500, headers=GZIP, stream=IteratorByteStream([b"x"])), "Expecting value"),
    "long list": (httpx.Response(200, stream=IteratorByteStream([b"[" + b"," * 600_000 + b"1]"])), "values"),
    "nested": (httpx.Response(403, stream=IteratorByteStream([b"[" * 100_000])), "nested"),
    "nested less": (httpx.Response(403, stream=IteratorByteStream([b"[" * 20 + b"]" * 20])), "nested"),
}


@pytest.mark.parametrize(("answer", "words"), ANSWERS.values(), ids=ANSWERS.keys())
def test_answer_of_an_image_registry_is_bounded(answer: httpx.Response, words: str) -> None:
    transport = httpx.MockTransport(lambda request: answer)
    with (
        httpx.Client(transport=transport, event_hooks={"response": [GUARD.after]}) as client,
        pytest.raises((httpx.RemoteProtocolError, ValueError), match=words),
        client.stream("GET", "https://registry/v2/") as response,
    ):
        answers.document_of(response)


def test_content_is_its_readers_to_count() -> None:
    long = [bytes(1 << 20)] * 20
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=IteratorByteStream(long)))
    with httpx.Client(transport=transport, event_hooks={"response": [GUARD.after]}) as client:
        with client.stream("GET", "https://registry/v2/", extensions={CONTENT: True}) as response:
            assert sum(map(len, response.iter_raw())) == 20 << 20
        with client.stream("GET", "https://registry/v2/") as response:
            assert sum(map(len, response.iter_raw())) == MOST_ANSWER
