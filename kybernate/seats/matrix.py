"""Which seats may be active together by name, as llama-swap's `matrix` has it, with its costs of an eviction.

A set is an expression: `a & b` are active together, `a | b` are alternatives, `+name` is another set. Each set stands
for its combinations; seats that no set names are free of the matrix. Source: the section `matrix` of llama-swap.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

MOST: Final = 4096  # combinations of a matrix
DEEPEST: Final = 32  # parentheses and sets within each other
TOKEN: Final = re.compile(r"\s*([&|()]|\+?[A-Za-z0-9_][A-Za-z0-9_.:/-]*)")
Combinations = frozenset[frozenset[str]]


class MatrixInvalid(Exception):
    """A matrix that cannot be used; the message says where it is wrong."""


@dataclass(frozen=True)
class Matrix:
    """Combinations of names, and what an eviction of each costs (1 where that is not named)."""

    combinations: Combinations
    costs: Mapping[str, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()

    def cost(self, name: str) -> int:
        return self.costs.get(name, 1)

    def to_evict(self, wanted: str, active: Collection[str]) -> frozenset[str]:
        """Return which of the active names must leave so that `wanted` may be active: those that cost least."""
        if wanted not in self.names:
            return frozenset()
        bound = self.names.intersection(active) - {wanted}
        choices = [bound - one for one in self.combinations if wanted in one]
        return min(choices, key=lambda out: (sum(map(self.cost, out)), sorted(out)), default=bound)

    def allows(self, active: Collection[str]) -> bool:
        """Return whether these may be active together."""
        bound = self.names.intersection(active)
        return not bound or any(bound <= one for one in self.combinations)


def read_matrix(document: object) -> Matrix:
    """Return the matrix of a parsed `matrix:` section: `vars` (or `var`), `evict_costs` and `sets`.

    Raises MatrixInvalid.
    """
    if not isinstance(document, Mapping):
        raise MatrixInvalid("matrix must be a mapping with vars, evict_costs and sets")
    if unknown := sorted(map(str, set(document) - {"vars", "var", "evict_costs", "sets"})):
        raise MatrixInvalid(f"matrix has the unknown keys {', '.join(unknown)}")
    variables = _texts(document.get("vars") or document.get("var") or {}, "vars")
    sets = _texts(document.get("sets") or {}, "sets")
    if not sets:
        raise MatrixInvalid("matrix.sets must name at least one set")
    found: set[frozenset[str]] = set()
    for name in sets:
        found |= _Reader(sets, variables).set_of(name, ())
        if len(found) > MOST:
            raise MatrixInvalid(f"matrix.sets.{name} has more than {MOST} combinations")
    names = frozenset[str]().union(*found)
    return Matrix(frozenset(found), dict(_costs(document.get("evict_costs") or {}, variables, names)), names)


def _texts(value: object, where: str) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(one, str) for pair in value.items() for one in pair):
        raise MatrixInvalid(f"matrix.{where} must be a mapping of texts")
    return value


def _costs(value: object, variables: Mapping[str, str], names: Collection[str]) -> Iterator[tuple[str, int]]:
    if not isinstance(value, Mapping):
        raise MatrixInvalid("matrix.evict_costs must be a mapping of numbers")
    for key, cost in value.items():
        name = variables.get(key, key)
        if name not in names and key not in variables:
            raise MatrixInvalid(f"matrix.evict_costs.{key} is neither a variable nor a name of a set")
        if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
            raise MatrixInvalid(f"matrix.evict_costs.{key} must be a whole number above 0, not {cost!r}")
        yield name, cost


class _Reader:
    """Reads expressions: `|` binds less than `&`."""

    def __init__(self, sets: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._sets, self._variables = sets, variables

    def set_of(self, name: str, inside: tuple[str, ...]) -> Combinations:
        if name in inside:
            raise MatrixInvalid(f"matrix.sets.{name} contains itself")
        if name not in self._sets:
            raise MatrixInvalid(f"matrix.sets.{inside[-1]} names +{name}, which is no set")
        if len(inside) > DEEPEST:
            raise MatrixInvalid(f"matrix.sets.{name} is nested too deeply")
        text = self._sets[name]
        tokens = _tokens(text, name)
        found = self._any(tokens, (*inside, name), 0)
        if tokens:
            raise MatrixInvalid(f"matrix.sets.{name}: {tokens[0]!r} is not expected in {text!r}")
        return found

    def _any(self, tokens: list[str], inside: tuple[str, ...], depth: int) -> Combinations:
        found = self._all(tokens, inside, depth)
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            found |= self._all(tokens, inside, depth)
        return found

    def _all(self, tokens: list[str], inside: tuple[str, ...], depth: int) -> Combinations:
        found = self._one(tokens, inside, depth)
        while tokens and tokens[0] == "&":
            tokens.pop(0)
            other = self._one(tokens, inside, depth)
            if len(found) * len(other) > MOST:
                raise MatrixInvalid(f"matrix.sets.{inside[-1]} has more than {MOST} combinations")
            found = frozenset(a | b for a in found for b in other)
        return found

    def _one(self, tokens: list[str], inside: tuple[str, ...], depth: int) -> Combinations:
        token = tokens.pop(0) if tokens else ""
        if token == "(" and depth < DEEPEST:
            found = self._any(tokens, inside, depth + 1)
            if not tokens or tokens.pop(0) != ")":
                raise MatrixInvalid(f"matrix.sets.{inside[-1]}: a parenthesis is not closed")
            return found
        if token in ("", "(", ")", "&", "|"):
            raise MatrixInvalid(f"matrix.sets.{inside[-1]}: a name is missing before {token or 'the end'!r}")
        if token.startswith("+"):
            return self.set_of(token[1:], inside)
        return frozenset({frozenset({self._variables.get(token, token)})})


def _tokens(text: str, name: str) -> list[str]:
    found, position = [], 0
    text = text.rstrip()
    while position < len(text):
        token = TOKEN.match(text, position)
        if token is None:
            raise MatrixInvalid(f"matrix.sets.{name}: cannot be read at character {position + 1} of {text!r}")
        found.append(token[1])
        position = token.end()
    return found
