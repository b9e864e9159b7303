"""A model behind an address: `model_program.py NAME GIB PORT [DEVICE]`, a transformer with random weights.

It answers GET /health once it has its weights, and POST /v1/chat/completions with a stream in OpenAI's form: a chunk
for each token, and a last one in which `loaded` is a word that this start of the program has chosen, and `weights` the
sum of all of its weights as they are then. A model says the same to the same question. DEVICE is "cuda" with torch and
transformers; "cpu" for a rehearsal of these; "pretended" allocates GIB on the pretended driver, and needs no package.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTH, INNER, HEADS, GROUPS, VOCABULARY = 4096, 14336, 32, 8, 32000
LAYER_BYTES = 2 * WIDTH * (2 * WIDTH + 2 * WIDTH * GROUPS // HEADS + 3 * INNER)
WORDS_BYTES = 2 * 2 * WIDTH * VOCABULARY
PROMPT, ANSWER = 64, 24  # tokens
PIECE = 64 << 20  # numbers that are added up together: a sum in 64 bits makes a copy of four times the size
PRETENDED = Path(__file__).parents[1] / "fakes/cuda"

Say = Callable[[str], Iterator[str]]  # tokens that follow a question
Sum = Callable[[], int]


def transformer(name: str, gib: float, device: str) -> tuple[Say, Sum]:
    """Load a model of Llama's form; with MODEL_WEIGHTS, from that file, which is written where there is none."""
    import torch  # of the machine
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(zlib.crc32(name.encode()))
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_hidden_layers=max(1, round((gib * (1 << 30) - WORDS_BYTES) / LAYER_BYTES)),
        vocab_size=VOCABULARY,
        max_position_embeddings=PROMPT + ANSWER,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    file = os.environ.get("MODEL_WEIGHTS", "")
    with torch.device(device):
        model: Any = LlamaForCausalLM(config).eval() if not Path(file).is_file() else None
    if model is None:
        with torch.device("meta"):
            model = LlamaForCausalLM(config).eval()
        model.load_state_dict(torch.load(file, mmap=True, map_location=device, weights_only=True), assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config, device=device)  # not of the weights
    elif file:
        torch.save(model.state_dict(), file)

    def say(question: str) -> Iterator[str]:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(zlib.crc32(question.encode()))
            tokens = torch.randint(1, VOCABULARY, (1, PROMPT), generator=generator).to(device)
            cache = DynamicCache()
            for _ in range(ANSWER):
                answer = model(tokens, past_key_values=cache, use_cache=True)
                tokens = answer.logits[:, -1:].argmax(-1)
                yield str(int(tokens))

    def weights() -> int:
        with torch.no_grad():
            bits = (one.contiguous().view(torch.int16).flatten() for one in model.parameters())
            return sum(int(piece.sum(dtype=torch.int64)) for one in bits for piece in one.split(PIECE))

    for _ in say("warm"):
        pass
    return say, weights


def pretended(name: str, gib: float) -> tuple[Say, Sum]:
    """Allocate on the pretended driver, by the program that the other tests compute with.

    Its weights change by each sum: what is returned is the first sum, and another number where they are not what that
    many steps make of them.
    """
    sys.path.append(str(PRETENDED))
    from array import array

    from computes import FACTOR, OFFSET, WORD, Gpu  # type: ignore[import-not-found]  # of the folder that was appended

    first = array("I", ((index * 2654435761 + zlib.crc32(name.encode())) % 2**32 for index in range(int(gib * 2**28))))
    gpu = Gpu(0, first)
    total, step = sum(first) % WORD, (1, 0)  # a word is, after all steps, itself times the first and plus the second

    def say(question: str) -> Iterator[str]:
        for number in range(ANSWER):
            yield str(zlib.crc32(f"{name} {question} {number}".encode()))

    def weights() -> int:
        nonlocal step
        gpu.use_in_this_thread()  # each request has one of its own
        step = step[0] * FACTOR % WORD, (step[1] * FACTOR + OFFSET) % WORD
        expected = total * step[0] + len(first) * step[1]
        return int(total + (sum(gpu.advance()) - expected) % WORD)

    return say, weights


class Handler(BaseHTTPRequestHandler):
    """Answers one request at a time: a model has one cache."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    name, loaded = "", secrets.token_hex(8)
    say: Say
    weights: Sum

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:  # http.server calls it so
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.lock:
            for token in type(self).say(question):
                self.event({"choices": [{"index": 0, "delta": {"content": f"{token} "}}]})
            self.event({"choices": [], "model": self.name, "loaded": self.loaded, "weights": type(self).weights()})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: object) -> None:
        self.chunk(f"data: {json.dumps(value)}\n\n".encode())

    def chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()


def main(name: str, gib: float, port: int, device: str = "cuda") -> None:
    say, weights = pretended(name, gib) if device == "pretended" else transformer(name, gib, device)
    Handler.name, Handler.say, Handler.weights = name, staticmethod(say), staticmethod(weights)
    print(f"{name}: loaded as {Handler.loaded}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
