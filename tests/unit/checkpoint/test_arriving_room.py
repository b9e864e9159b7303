"""For how much room a resume waits before it copies: pure, on bytes by GPU."""

from __future__ import annotations

from kybernate_shim.checkpoint.gpu.room import FIRST_BYTES, STALLED_SECONDS, arriving_room
from kybernate_shim.gpu.helper_answers import RoomComing

GIB = 1 << 30


def test_on_one_gpu_the_first_of_the_room_is_enough() -> None:
    assert arriving_room({"GPU-1": 16 * GIB}, 60) == ({"GPU-1": FIRST_BYTES}, RoomComing("GPU-1", STALLED_SECONDS))
    assert arriving_room({"GPU-1": GIB // 4}, 2) == ({"GPU-1": GIB // 4}, RoomComing("GPU-1", 2))


def test_on_several_gpus_all_of_it_is_waited_for() -> None:
    later = {"GPU-1": 16 * GIB, "GPU-2": GIB}
    assert arriving_room(later, 60) == (later, None)
    assert arriving_room({}, 60) == ({}, None)
