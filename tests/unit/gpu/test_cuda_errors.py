"""What a user reads: what failed, why, how things are now, what to do."""

from __future__ import annotations

import pytest

from kybernate_shim.gpu.errors import cuda_call_failed, cuda_call_unanswered, join

READ = {
    ("lock", "CUDA_ERROR_NOT_READY"): "it keeps running; allow a longer timeout",
    ("lock", "CUDA_ERROR_NOT_INITIALIZED"): "it holds no CUDA state",
    ("unlock", "CUDA_ERROR_OPERATING_SYSTEM"): "there is no such process",
    ("restore", "CUDA_ERROR_OPERATING_SYSTEM"): "an earlier restore of it has failed",
    ("restore", "CUDA_ERROR_OUT_OF_MEMORY"): "end the process and restore it from a checkpoint image",
    ("checkpoint", "CUDA_ERROR_ILLEGAL_STATE"): "nothing was changed",
    ("checkpoint", "CUDA_ERROR_OUT_OF_MEMORY"): "`kybernate cuda state` shows",
}


@pytest.mark.parametrize(("verb", "name"), READ)
def test_refusal_tells_what_follows(verb: str, name: str) -> None:
    text = str(cuda_call_failed(verb, 17, name, "some text"))
    assert text.startswith(f"CUDA {verb} of process 17 failed: {name} (some text); ")
    assert READ[verb, name] in text


def test_deadline_names_process_verb_and_seconds() -> None:
    error = cuda_call_unanswered("checkpoint", 17, 2.5, done=[18])
    assert str(error).startswith("CUDA checkpoint of process 17 was not answered within 2.5 s")
    assert error.done == (18,)


def test_join_keeps_every_failure() -> None:
    first, second = cuda_call_unanswered("lock", 17, 1), cuda_call_unanswered("lock", 18, 1)
    assert join([first, second]) is first
    assert first.__notes__ == [f"also: {second}"]
