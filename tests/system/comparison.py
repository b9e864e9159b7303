"""Compares handlers by tests of others: what became of each test by each handler, and where they differ.

What differs is repeated by all of them, so that a test that fails now and then is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

NOT_RUN = "not run"
NOTHING: Mapping[str, str] = MappingProxyType({})
Outcomes = Mapping[str, str]  # how each test has ended, by its full name
Run = Callable[[str, Path, Sequence[str]], Outcomes]  # by a handler, with a directory for logs; all tests or these


def compare(
    handlers: Sequence[str], run: Run, reports: Path, *, word: str, left_out: Mapping[str, str] = NOTHING
) -> int:
    """Run all tests by each handler, and once more those that differ; print the tables and return the exit status.

    It is 1 where outcomes differ, or a handler passes nothing. The tables are in result.md of `reports` as well.
    """
    found = {handler: dict(run(handler, reports / handler, ())) for handler in handlers}
    repeated = differing(found)
    if repeated:
        print(f"{len(repeated)} {word}s differ and are repeated", flush=True)
        for handler in found:
            found[handler] |= run(handler, reports / handler / "again", repeated)
    result = render(found, repeated, word=word, left_out=left_out)
    (reports / "result.md").write_text(result)
    print(result)
    return int(bool(differing(found)) or any("passed" not in one.values() for one in found.values()))


def differing(found: Mapping[str, Outcomes]) -> list[str]:
    """Return the tests that have not ended in the same way by all handlers, those included that some have not run."""
    tests = sorted({test for outcomes in found.values() for test in outcomes})
    return [test for test in tests if len({outcomes.get(test, NOT_RUN) for outcomes in found.values()}) > 1]


def render(
    found: Mapping[str, Outcomes], repeated: Iterable[str] = (), *, word: str, left_out: Mapping[str, str] = NOTHING
) -> str:
    """Return, as Markdown, counts for each handler, what differs, what fails by all, and what did not differ again.

    `word`: what one test is named. `left_out`: which tests have not been run, with the reasons.
    """
    words = f"{word}s"
    rows = []
    for handler, outcomes in found.items():
        counts = Counter(outcomes.values())
        others = counts.total() - counts["passed"] - counts["skipped"]
        rows.append([f"`{handler}`", str(counts.total()), str(counts["passed"]), str(others), str(counts["skipped"])])
    differ = differing(found)
    table = [[_code(test), *(outcomes.get(test, NOT_RUN) for outcomes in found.values())] for test in differ]
    first = next(iter(found.values()), NOTHING)
    fail = [test for test, how in sorted(first.items()) if how not in ("passed", "skipped") and test not in differ]
    again = [[_code(test)] for test in sorted(repeated) if test not in differ]
    given = [[_code(tests), why] for tests, why in left_out.items()]
    title = words.capitalize()
    return "\n".join([
        _table(["handler", words, "passed", "failed", "skipped"], rows),
        _section(f"{title} whose outcome differs", [word, *(f"`{handler}`" for handler in found)], table),
        _section(f"{title} that fail by all handlers", [word], [[_code(test)] for test in fail]),
        _section(f"{title} that differed and did not when all handlers repeated them", [word], again),
        *[_section(f"{title} that are left out", [words, "reason"], given)] * bool(given),
    ])  # fmt: skip


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}: {len(rows)}\n\n{_table(head, rows)}" if rows else f"{title}: none\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def _code(name: str) -> str:
    return f"`{name.replace('|', chr(92) + '|')}`"
