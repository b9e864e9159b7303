"""A machine with a file of models for `kybernate up`, as its tests share it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kybernate.up import control
from kybernate.up.control import LOGS
from kybernate.up.pods import Pods, Running
from kybernate_shim.config import Config
from tests.system.checkpoints import PYTHON
from tests.system.ctr import eventually
from tests.system.node_agent import NodeAgent

KYBERNATE = (sys.executable, "-c", "from kybernate.cli import main; main()")
PROJECT = "lab"
URL = "http://127.0.0.1:18080"
# Says what it was loaded with, which a program that is started again has another one of; ends when it is asked to, and
# by SIGTERM unless it STAYS, as many programs do that are the first of their container.
SERVER = """
import http.server, json, os, secrets, signal, sys
if "STAYS" not in os.environ: signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
loaded = secrets.token_hex(8)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, text):
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self): self.answer("ok")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"end yourself" in body: os._exit(7)
        self.answer(json.dumps({"model": sys.argv[2], "loaded": loaded, "pid": os.getpid()}))
print("loaded", loaded, flush=True)
host = sys.argv[3] if sys.argv[3:] else "127.0.0.1"
http.server.ThreadingHTTPServer((host, int(sys.argv[1])), Handler).serve_forever()
"""
ARGUMENTS = f"-c, {json.dumps(SERVER)}, '${{PORT}}', '${{MODEL}}'"


@dataclass
class Machine:
    """A machine with a file of models, and the agent."""

    directory: Path
    agent: NodeAgent

    @property
    def file(self) -> Path:
        return self.directory / "models.yaml"

    def write(self, *models: str, extra: str = "") -> None:
        lines = [f"project: {PROJECT}", "listen: 127.0.0.1:18080", "defaults: {start-timeout: 60s}", "models:"]
        self.file.write_text("\n".join([*lines, *models, extra]) + "\n")

    def kybernate(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [*KYBERNATE, *words], capture_output=True, text=True, check=False, cwd=self.directory, timeout=120
        )
        assert done.returncode == status, done.stdout + done.stderr + self.log()
        return done.stdout + done.stderr

    def up(self, *words: str) -> None:
        self.kybernate("up", "models.yaml", "-d", "--agent", self.agent.address, *words)

    def log(self) -> str:
        path = LOGS / PROJECT / "up.log"
        return path.read_text() if path.exists() else ""

    def pods(self) -> dict[str, Running]:
        with Pods(PROJECT) as pods:
            return pods.list()


def of_image(name: str) -> str:
    return f"  {name}: {{image: '{PYTHON}', command: [python3, {ARGUMENTS}], user: 1000}}"


def of_host(name: str) -> str:
    return f"  {name}: {{command: [/usr/bin/python3, {ARGUMENTS}], user: 1000}}"


def in_pod(name: str) -> str:
    """A model with a network of its own; its port is that of others, too."""
    return f"  {name}: {{image: '{PYTHON}', command: [python3, {ARGUMENTS}, '0.0.0.0'], user: 1000, network: pod}}"


def ask(model: str, text: str = "hello") -> Any:
    """Send a model a request by the one address; None where it did not answer."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    try:
        answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=30)
    except httpx.TransportError:
        return None
    return answer.json() if answer.is_success else None


def loaded(model: str) -> str:
    return str((ask(model) or {}).get("loaded", ""))


@contextmanager
def machine(directory: Path, agent: NodeAgent) -> Iterator[Machine]:
    """Yield a machine; nothing of its models is left when the block ends."""
    found = Machine(directory, agent)
    try:
        yield found
    finally:
        if found.file.exists():
            found.kybernate("down", "models.yaml", "--agent", agent.address)
        shutil.rmtree(Config().checkpoint_root / PROJECT, ignore_errors=True)
        shutil.rmtree(LOGS, ignore_errors=True)
        shutil.rmtree(control.LOCKS, ignore_errors=True)


def ready(machine: Machine, *models: str) -> dict[str, str]:
    """Wait until models answer and have their templates; return what each was loaded with."""
    for model in models:
        try:
            eventually(lambda name=model: loaded(name), seconds=90)
            eventually(lambda name=model: f"{name}: ready at" in machine.log(), seconds=90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{machine.log()}") from error
    return {model: loaded(model) for model in models}
