"""Serves a transformer with random weights, and checks what it says: `serving_payload.py GIB [DEVICE]`.

A model of Llama's form with about GIB of weights has read a long prompt, and keeps the keys and values of that. A line
on the standard input, with a number, is a request: words that the number stands for follow the prompt, and generate()
says what comes next, with a copy of the cache. "ready" is printed in the beginning, "begun" when half of an answer is
there, "step N" after it. An answer that is not the one before, weights or a cache that have changed, or an error of
CUDA, ends it with "wrong: …". It needs torch and transformers. DEVICE is "cuda"; "cpu" for a rehearsal.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

WIDTH, INNER, HEADS, GROUPS, VOCABULARY = 4096, 14336, 32, 8, 32000
LAYER_BYTES = 2 * WIDTH * (2 * WIDTH + 2 * WIDTH * GROUPS // HEADS + 3 * INNER)
WORDS_BYTES = 2 * 2 * WIDTH * VOCABULARY
PROMPT, QUESTION, ANSWER = 2048, 16, 96  # tokens
PIECE = 64 << 20  # numbers that are added up together: a sum in 64 bits makes a copy of four times the size


class Halfway:
    """What generate() hands tokens to, after the prompt's."""

    def __init__(self) -> None:
        self._left = ANSWER // 2 + 1

    def put(self, tokens: object) -> None:
        self._left -= 1
        if not self._left:
            print("begun", flush=True)

    def end(self) -> None:
        pass


def serve(gib: float, device: str) -> None:
    """Answer requests until there are no more."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # of a fixed size, or the same sums come in another order
    import torch  # of the machine
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_hidden_layers=max(1, round((gib * (1 << 30) - WORDS_BYTES) / LAYER_BYTES)),
        vocab_size=VOCABULARY,
        max_position_embeddings=PROMPT + QUESTION + ANSWER,
        bos_token_id=None,
        eos_token_id=None,  # every answer is as long
        pad_token_id=0,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()

    def words(seed: int, count: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCABULARY, (1, count), generator=generator).to(device)

    def kept() -> int:
        """Add up all weights, and what the prompt's keys and values are."""
        tensors = [*model.parameters(), *(one for layer in cache.layers for one in (layer.keys, layer.values))]
        bits = (one.contiguous().view(torch.int16).flatten() for one in tensors)
        return sum(int(piece.sum(dtype=torch.int64)) for one in bits for piece in one.split(PIECE))

    with torch.no_grad():
        prompt, cache = words(0, PROMPT), DynamicCache()
        model(prompt, past_key_values=cache)
        expected, answers = kept(), dict[int, list[int]]()
        print("ready", flush=True)
        for number, line in enumerate(sys.stdin, 1):
            question = int(line)
            asked = torch.cat([prompt, words(question, QUESTION)], dim=1)
            answer = model.generate(
                asked,
                attention_mask=torch.ones_like(asked),
                past_key_values=copy.deepcopy(cache),
                max_new_tokens=ANSWER,
                do_sample=False,
                streamer=Halfway(),
            )
            said = answer[0, asked.shape[1] :].tolist()
            require(len(said) == ANSWER and said == answers.setdefault(question, said), "the answer")
            require(kept() == expected, "the weights or the cache")
            print(f"step {number}", flush=True)


def require(right: bool, what: str) -> None:
    if not right:
        print(f"wrong: {what}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    serve(float(sys.argv[1]), *(sys.argv[2:] or ["cuda"]))
