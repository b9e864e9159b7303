"""Answers what is asked of the program, see the package."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from ctypes import c_void_p
from typing import Any

from tests.fakes.cuda.zoo import cases
from tests.fakes.cuda.zoo.visit import ENDS_CHECKPOINTS, ROOM, Driver, Failed, Prepared, Visit

PAUSES, LONGEST_PAUSE = 0.2, 0.05  # of a thread, s: else it is always in a call when a lock comes


class Zoo:
    """Answers what is asked."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._prepared: dict[str, tuple[Prepared, tuple[Any, ...]]] = {}
        self._answers: dict[str, int] = {}
        self._about_to, self._go = threading.Semaphore(0), threading.Event()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._counts: list[int] = []

    def cases(self) -> str:
        return ", ".join(cases)

    def prepare(self, *names: str) -> str:
        visit = Visit(self._driver, self._driver.allocate(ROOM), c_void_p())
        for name in names:
            visit.stream = self._driver.stream()
            self._prepared[name] = visit.begin(name)
            threading.Thread(target=self._call, args=(name,), daemon=True).start()
            self._about_to.acquire()
        return "prepared"

    def call(self) -> str:
        self._go.set()
        for _ in self._prepared:
            self._about_to.acquire()
        return "called"

    def _call(self, name: str) -> None:
        self._driver.call("cuCtxSetCurrent", self._driver.context)
        self._about_to.release()
        self._go.wait()
        self._about_to.release()
        self._answers[name] = self._driver.code(name.split()[0], *self._prepared[name][1])

    def answers(self) -> str:
        return ", ".join(f"{name}={code}" for name, code in list(self._answers.items()))

    def check(self) -> str:
        for name, (body, _) in self._prepared.items():
            problem = verdict(body)
            if problem:
                return f"{name}: {problem}"
        return "right"

    def loop(self, count: str) -> str:
        self._counts = [0] * int(count)
        self._threads = [threading.Thread(target=self._loop, args=(i,), daemon=True) for i in range(int(count))]
        for thread in self._threads:
            thread.start()
        return "looping"

    def _loop(self, number: int) -> None:
        name = "cuCtxSetCurrent"
        names = [name for name in cases if name != ENDS_CHECKPOINTS]
        try:
            self._driver.call(name, self._driver.context)
            visit = Visit(self._driver, self._driver.allocate(ROOM), self._driver.stream())
            while not self._stopped.is_set():
                name = random.choice(names)
                self._run(name, visit)
                visit.clear()
                self._counts[number] += 1
                if random.random() < PAUSES:
                    time.sleep(random.uniform(0, LONGEST_PAUSE))
        except Failed as error:
            give_up(f"{name}: {error}")

    def _run(self, name: str, visit: Visit) -> None:
        body, arguments = visit.begin(name)
        self._driver.call(name.split()[0], *arguments)
        problem = verdict(body)
        if problem:
            give_up(f"{name}: {problem}")

    def count(self) -> str:
        return str(sum(self._counts))

    def stop(self) -> str:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        return self.count()


def verdict(body: Prepared) -> str:
    """Run a case's checks, and return what is wrong, if anything."""
    try:
        next(body, None)
    except AssertionError as error:
        return f"it has not done what it should {error}".strip()
    except Failed as error:
        return str(error)
    return ""


def give_up(problem: str) -> None:
    os.write(1, f"{problem}\n".encode())
    os._exit(3)  # from any thread


def main() -> None:
    zoo = Zoo()
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        print(getattr(zoo, verb)(*(rest.split(", ") if rest else ())), flush=True)


if __name__ == "__main__":
    main()
