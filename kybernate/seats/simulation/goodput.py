"""How many models one GPU serves well: the largest number of which 90 % of requests begin within the bound.

This is Aegaeon's way to count. Each model has requests at random times, at a rate of its own.
"""

from __future__ import annotations

from dataclasses import replace

from kybernate.seats.simulation.simulate import Outcome, Setup, replay
from kybernate.seats.simulation.traces import poisson

WANTED = 0.9
MOST = 256
HOURS = 2


def models_per_gpu(policy: str, setup: Setup, rate: float, work: float, seconds: float = HOURS * 3600.0) -> int:
    """Return the number of models, each with `rate` requests in a second of `work` seconds; 0 if not even one."""
    good, bad = 0, 1
    while bad <= MOST and goodput(policy, bad, setup, rate, work, seconds).goodput >= WANTED:
        good, bad = bad, bad * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if goodput(policy, middle, setup, rate, work, seconds).goodput >= WANTED:
            good = middle
        else:
            bad = middle
    return good


def goodput(policy: str, models: int, setup: Setup, rate: float, work: float, seconds: float) -> Outcome:
    """Return what a policy does with so many models on one GPU."""
    trace = list(poisson(models, rate * models, work, seconds))
    return replay(trace, policy, replace(setup, gpus=1, seats=models))
