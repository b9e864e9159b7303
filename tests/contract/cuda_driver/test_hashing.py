"""The kernel that hashes pieces: against the same hash written once more in Python, and against a real compiler."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from array import array
from hashlib import shake_256
from pathlib import Path

import pytest

from kybernate_shim.arena.pieces import PIECE
from kybernate_shim.cuda_worker import kernel
from kybernate_shim.errors import Refused
from tests.fakes.cuda import Gpus

P = 2**61 - 1
KEY = bytes(range(32))
ON_A_GPU = """
import json, sys
from cuda.bindings import driver as cuda
from kybernate_shim.cuda_worker.calls import checked
from kybernate_shim.cuda_worker.hashing import Hasher

data = open(sys.argv[1], "rb").read()
checked(cuda.cuInit(0))
checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(0))))
memory = int(checked(cuda.cuMemAlloc(len(data))))
checked(cuda.cuMemcpyHtoD(memory, data, len(data)))
half = len(data) // 2 >> 21 << 21
blocks = [(memory, half), (memory + half, len(data) - half)]
found = Hasher(b"").look(blocks, bytes.fromhex(sys.argv[2]), checked(cuda.cuStreamCreate(1)))
print(json.dumps([["".join(one.marks.hex() for one in found), [bit for one in found for bit in one.any]]]))
"""


def hashes(gpus: Gpus, data: bytes, key: bytes, folder: Path) -> tuple[list[str], list[int]]:
    """Hash pieces on a pretended GPU; they are two blocks of it."""
    (folder / "data").write_bytes(data)
    command = [sys.executable, "-c", ON_A_GPU, folder / "data", key.hex()]
    ((marks, bits),) = json.loads(subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(Path.cwd())}))
    return [marks[at : at + 32] for at in range(0, len(marks), 32)], bits


class Reference:
    """The hash as it is described, one number after the other."""

    def __init__(self, key: bytes) -> None:
        stream = shake_256(key).digest(70 * 4 + 4 * 129 * 8)
        self.nh = list(array("I", stream[:280]))
        numbers = [number % 2**61 for number in array("Q", stream[280:])]
        self.base, self.spread = numbers[:4], numbers[4:]

    @functools.lru_cache  # noqa: B019  # of one test
    def chunk(self, words: tuple[int, ...]) -> list[int]:
        return [
            sum(
                ((words[i] + self.nh[i + 2 * lane]) % 2**32) * ((words[i + 1] + self.nh[i + 1 + 2 * lane]) % 2**32)
                for i in range(0, 64, 2)
            )
            % 2**64
            for lane in range(4)
        ]

    def piece(self, piece: bytes) -> str:
        words = list(array("I", piece))
        totals = [0] * 4
        for thread in range(128):
            polynomials = [0] * 4
            for start in range(0, len(words), 128 * 64):
                loads = [start + (load * 128 + thread) * 4 for load in range(16)]
                sums = self.chunk(tuple(word for at in loads for word in words[at : at + 4]))
                for lane in range(4):
                    high, low = divmod(sums[lane], 2**32)
                    polynomials[lane] = ((polynomials[lane] * self.base[lane] + high) * self.base[lane] + low) % P
            for lane in range(4):
                totals[lane] += polynomials[lane] * self.spread[lane * 128 + thread]
        return b"".join((total % P % 2**32).to_bytes(4, "little") for total in totals).hex()


def test_hash_is_the_one_that_is_described(gpus: Gpus, tmp_path: Path) -> None:
    """Pieces of few different chunks, which the reference needs not compute again and again."""
    chance = random.Random(1)
    strange = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0", b"\0\0\0\x80"]
    contents = [chance.randbytes(16) * (PIECE // 16)]
    contents.append(b"".join(four * (PIECE // 16) for four in strange))
    contents.append(bytes(PIECE - 1) + b"\1")
    contents.append(b"\1" + bytes(PIECE - 1))
    contents.append(chance.randbytes(1 << 16) + bytes(PIECE - (1 << 16)))
    contents.append(b"\xff" * PIECE)
    marks, bits = hashes(gpus, b"".join(contents), KEY, tmp_path)
    reference = Reference(KEY)
    assert marks == [reference.piece(content) for content in contents]
    assert bits == [1] * len(contents)


def test_zeros_are_told_by_their_bits(gpus: Gpus, tmp_path: Path) -> None:
    last = bytes(PIECE - 1) + b"\x80"
    marks, bits = hashes(gpus, bytes(PIECE) + last + bytes(PIECE), KEY, tmp_path)
    assert bits == [0, 1, 0]
    assert (marks[0], marks[2]) == ("0" * 32, "0" * 32)
    assert marks[1] != "0" * 32


def test_every_word_and_its_place_matter(gpus: Gpus, tmp_path: Path) -> None:
    """One bit each, in words that differ in lane, load, thread and stride; and two words in each other's place."""
    places = [0, 4, 8, 12, 16, 2048, 4096, 1 << 15, (1 << 15) + 4, 1 << 20, PIECE - 4]
    contents = []
    for place in places:
        content = bytearray(PIECE)
        content[place] = 1
        contents.append(bytes(content))
    marks, _ = hashes(gpus, b"".join(contents), KEY, tmp_path)
    assert len(set(marks)) == len(places)


def test_hash_depends_on_the_key(gpus: Gpus, tmp_path: Path) -> None:
    content = b"same" * (PIECE // 4)
    first, _ = hashes(gpus, content * 2, KEY, tmp_path)
    second, _ = hashes(gpus, content * 2, KEY[::-1], tmp_path)
    assert first[0] == first[1]
    assert all(first[0][at : at + 8] != second[0][at : at + 8] for at in range(0, 32, 8))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_real_compiler_takes_the_source(architecture: str) -> None:
    """It needs no GPU."""
    code = kernel.compiled(architecture)
    assert code[:4] == b"\x7fELF"
    assert b"hash_pieces" in code
    assert b"finish_pieces" in code


def test_machine_code_is_made_once(tmp_path: Path) -> None:
    code = kernel.machine_code(tmp_path, 9, 0)
    (path,) = tmp_path.iterdir()
    assert path == kernel.cached(tmp_path, 9, 0)
    path.write_bytes(b"as it was left")
    assert code[:4] == b"\x7fELF"
    assert kernel.machine_code(tmp_path, 9, 0) == b"as it was left"


def test_gpu_that_the_compiler_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="for sm_990 cannot be compiled: NVRTC does not compile for sm_990"):
        kernel.machine_code(tmp_path, 99, 0)
    assert list(tmp_path.iterdir()) == []


def test_compiler_that_crashes_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Refused, match="sm_90 cannot be compiled: "):
        kernel.machine_code(tmp_path / "none", 9, 0)
