"""The bytes of a chunk store: whatever is written is read back, and whatever was changed is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.store.errors import ChunkDamaged, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.format import pack as packs
from kybernate.store.format import recipe as recipes
from kybernate.store.format.chunks import CHUNK_BYTES, PAGE_BYTES, Pages, cuts, cuts_by_address
from kybernate.store.format.recipe import Recipe, StoredFile
from kybernate.store.format.sealing import Codec, Sealed, chunk_id, seal, unseal
from kybernate.store.keys import StoreKey

PLAIN, SECRET = StoreKey(b"k" * 32), StoreKey(b"k" * 32, encrypted=True)
KEYS = pytest.mark.parametrize("key", [PLAIN, SECRET], ids=["plain", "encrypted"])
RUNS = st.lists(st.builds(Pages, st.integers(0, 1 << 40).map(lambda page: page * PAGE_BYTES), st.integers(1, 2000)))


@given(st.integers(0, 5 * CHUNK_BYTES), RUNS)
def test_cuts_cover_a_file_without_gaps(size: int, runs: list[Pages]) -> None:
    for found in (list(cuts(size)), list(cuts_by_address(size, runs))):
        end = 0
        for offset, length in found:
            assert offset == end
            assert 0 < length <= CHUNK_BYTES
            end = offset + length
        assert end == size


def test_page_more_changes_one_chunk() -> None:
    before = [Pages(0, 512), Pages(4 * CHUNK_BYTES, 100), Pages(9 * CHUNK_BYTES, 512)]
    after = [Pages(0, 512), Pages(4 * CHUNK_BYTES - PAGE_BYTES, 101), Pages(9 * CHUNK_BYTES, 512)]
    old, new = ({_memory(runs, cut) for cut in _cut(runs)} for runs in (before, after))
    assert len(old) == 3
    assert old <= new
    assert len(new - old) == 1


def _cut(runs: list[Pages]) -> list[tuple[int, int]]:
    return list(cuts_by_address(sum(run.count for run in runs) * PAGE_BYTES, runs))


def _memory(runs: list[Pages], cut: tuple[int, int]) -> tuple[int, ...]:
    """Return the addresses of the pages in a chunk."""
    addresses = [run.address + page * PAGE_BYTES for run in runs for page in range(run.count)]
    return tuple(addresses[cut[0] // PAGE_BYTES : (cut[0] + cut[1]) // PAGE_BYTES])


@KEYS
@given(content=st.binary(min_size=1, max_size=5000), repeat=st.integers(1, 50), level=st.integers(0, 5))
def test_sealed_chunk_is_opened(key: StoreKey, content: bytes, repeat: int, level: int) -> None:
    content *= repeat
    assert unseal(key, seal(key, chunk_id(key, content), content, level=level)) == content


@KEYS
@given(flip=st.integers(0, 10_000), content=st.binary(min_size=100, max_size=3000))
def test_flipped_bit_is_found_or_changes_nothing(key: StoreKey, flip: int, content: bytes) -> None:
    """A bit of a compressed frame may be one that the content does not depend on; all others are found."""
    sealed = seal(key, chunk_id(key, content), content)
    damaged = bytearray(sealed.content)
    damaged[flip // 8 % len(damaged)] ^= 1 << flip % 8
    changed = Sealed(sealed.id, sealed.codec, sealed.size, bytes(damaged))
    if sealed.codec == Codec.ZSTD:
        with suppress(ChunkDamaged):
            assert unseal(key, changed) == content
    else:
        with pytest.raises(ChunkDamaged):
            unseal(key, changed)


def test_compression_is_used_where_it_pays() -> None:
    text, noise = b"weights " * 10_000, os.urandom(80_000)
    assert len(seal(PLAIN, b"", text).content) < len(text) / 50
    assert seal(PLAIN, b"", noise).content == noise
    assert seal(PLAIN, b"", text, level=0).content == text


def test_frame_cannot_claim_more_than_the_index_says() -> None:
    sealed = seal(PLAIN, b"i" * 32, bytes(1 << 20))
    with pytest.raises(ChunkDamaged, match="has another size than the index says"):
        unseal(PLAIN, Sealed(sealed.id, sealed.codec, 4096, sealed.content))


def test_equal_content_has_no_equal_name_under_another_key() -> None:
    assert chunk_id(PLAIN, b"content") == chunk_id(SECRET, b"content")
    assert chunk_id(StoreKey(b"l" * 32), b"content") != chunk_id(PLAIN, b"content")


def test_encrypted_chunk_cannot_pass_for_another() -> None:
    one, other = (seal(SECRET, chunk_id(SECRET, content), content) for content in (b"a" * 99, b"b" * 99))
    with pytest.raises(ChunkDamaged, match="was not encrypted with this store's key"):
        unseal(SECRET, Sealed(one.id, one.codec, one.size, other.content))


def _pack(*contents: bytes) -> packs.Pack:
    builder = packs.PackBuilder(PLAIN)
    for content in contents:
        builder.add(seal(PLAIN, chunk_id(PLAIN, content), content))
    return builder.finish()


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20))
def test_pack_says_what_is_in_it(contents: list[bytes]) -> None:
    pack = _pack(*contents)
    footer = packs.read_footer(len(pack.content), bytes(pack.content[-packs.FOOTER.size :]))
    table = bytes(pack.content[footer.start : footer.start + footer.length])
    places = packs.read_table(PLAIN, pack.name, table, footer)
    assert places == pack.places
    for content, place in zip(contents, places, strict=True):
        stored = bytes(pack.content[place.offset : place.offset + place.stored])
        assert unseal(PLAIN, Sealed(place.id, place.codec, place.size, stored)) == content


@pytest.mark.parametrize(
    "damage",
    [lambda pack: pack[:-1], lambda pack: pack[10:], lambda pack: b"", lambda pack: pack[:-8] + b"KYBPEND2"],
    ids=["end", "begin", "empty", "version"],
)
def test_cut_pack_is_refused(damage: Callable[[bytes], bytes]) -> None:
    content = damage(bytes(_pack(b"one", b"two").content))
    with pytest.raises(StoreInvalid):
        packs.read_footer(len(content), content[-packs.FOOTER.size :])


@given(st.integers(0, 1 << 20))
def test_changed_table_is_refused(flip: int) -> None:
    pack = _pack(b"one", b"two")
    footer = packs.read_footer(len(pack.content), bytes(pack.content[-packs.FOOTER.size :]))
    table = bytearray(pack.content[footer.start : footer.start + footer.length])
    table[flip // 8 % len(table)] ^= 1 << flip % 8
    with pytest.raises(StoreInvalid):
        packs.read_table(PLAIN, pack.name, bytes(table), footer)


def test_equal_chunks_make_packs_of_different_names() -> None:
    assert _pack(b"one", b"two").name != _pack(b"one", b"two").name


def test_index_is_read_back_and_protected() -> None:
    some = [(pack.name, pack.places) for pack in (_pack(b"one", b"two"), _pack(b"three"))]
    content = indexes.encode(PLAIN, some)
    assert list(indexes.decode(PLAIN, content)) == some
    for wrong in (content[:-1], b"x" + content[1:], indexes.encode(StoreKey(b"l" * 32), some)):
        with pytest.raises(StoreInvalid):
            list(indexes.decode(PLAIN, wrong))


RECIPE = Recipe(
    "id-1",
    "team-a",
    "web",
    12.5,
    b"{manifest}\n",
    (StoredFile("core-1.img", ((7, b"c" * 32), (CHUNK_BYTES * 3, b""))),),
)


@KEYS
def test_recipe_is_read_back_and_protected(key: StoreKey) -> None:
    content = recipes.encode(key, RECIPE)
    assert recipes.decode(key, content) == RECIPE
    assert (b"team-a" in content) == (not key.encrypted)
    for wrong in (content[:-1], content.replace(b"e", b"f", 1), b"", recipes.encode(StoreKey(b"l" * 32), RECIPE)):
        with pytest.raises(StoreInvalid):
            recipes.decode(key, wrong)


@pytest.mark.parametrize(
    "file",
    [
        StoredFile("../../etc/passwd", ((7, b""),)),
        StoredFile("core.img", ((7, b"short"),)),
        StoredFile("core.img", ((CHUNK_BYTES + 1, b"c" * 32),)),
        StoredFile("core.img", ((-1, b""),)),
    ],
    ids=["path", "chunk", "size", "negative"],
)
def test_recipe_with_an_impossible_file_is_refused(file: StoredFile) -> None:
    content = recipes.encode(PLAIN, Recipe("id", "", "name", 0.0, b"", (file,)))
    with pytest.raises(StoreInvalid, match="cannot be read"):
        recipes.decode(PLAIN, content)
