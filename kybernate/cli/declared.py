"""The declarations of commands' parameters, which typer reads, and this module alone reads for a command in a hurry.

typer, with what it brings, takes longer to load than `kybernate suspend` does to suspend. So the commands that people
and programs wait for are called without it: what their command lines have nearly always is understood here. All else,
such as a request for help or a mistake, is left to typer, which has the words for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Option:
    """An option of a command, as typer.Option: `names` begin with dashes, those of a switch may be "--yes/--no".

    `least` is the smallest number, and `default` what help shows as the default in place of it, "" for nothing.
    """

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    envvar: str | None = None
    least: float | None = None
    default: str | None = None

    def for_typer(self) -> Any:
        from typer import Option as TyperOption

        return TyperOption(
            *self.names, help=self.help, metavar=self.metavar, envvar=self.envvar, min=self.least,
            show_default=_shown(self.default),
        )  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """An argument of a command, as typer.Argument."""

    metavar: str
    help: str
    completed_by: str = ""  # the function of completion.py that a shell asks

    def for_typer(self) -> Any:
        from typer import Argument as TyperArgument

        from kybernate.cli import completion  # the commands themselves do not need it

        complete = getattr(completion, self.completed_by) if self.completed_by else None
        return TyperArgument(metavar=self.metavar, help=self.help, show_default=False, autocompletion=complete)


def _shown(default: str | None) -> bool | str:
    return True if default is None else default or False


def declare(command: Callable[..., Any]) -> None:
    """Give a command the annotations that typer understands. Idempotent."""
    hints = get_type_hints(command, include_extras=True)
    for name, hint in hints.items():
        if isinstance(found := _declaration(hint), Option | Argument):
            hints[name] = Annotated[get_args(hint)[0], found.for_typer(), found]
    command.__annotations__ = hints


def spelled(words: Sequence[str]) -> list[str]:
    """Return the words of a command with `--json`, which is short for it, spelled as `--output=json`."""
    end = words.index("--") if "--" in words else len(words)
    return [*("--output=json" if word == "--json" else word for word in words[:end]), *words[end:]]


class NotUnderstood(Exception):
    """The words need typer."""


def parsed(command: Callable[..., Any], words: Sequence[str], shared: Mapping[str, Option] = NONE) -> dict[str, Any]:
    """Return the arguments by which to call `command`, as typer would. Raises NotUnderstood.

    Options in `shared` are not the command's own; those that are given are in the answer by their names.
    """
    declared = [*_declared(command), *(_Parameter(name, str, one, optional=True) for name, one in shared.items())]
    options = {name: one for one in declared for name in one.switches()}
    arguments = [one for one in declared if isinstance(one.what, Argument)]
    found: dict[str, Any] = {}
    rest = spelled(words) if any(one.name == "output" for one in declared) else list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            one, given = _option(word, options, rest)
        elif arguments:
            one, given = arguments.pop(0), word
        else:
            raise NotUnderstood
        if one.name in found:
            raise NotUnderstood
        found[one.name] = one.read(given)
    for one in declared:
        if one.name in found:
            continue
        if (default := one.from_environment()) is not None:
            found[one.name] = one.read(default)
        elif not one.optional:
            raise NotUnderstood
    return found


def _option(word: str, options: Mapping[str, _Parameter], rest: list[str]) -> tuple[_Parameter, str]:
    """Return which option a word is, and its value, which may be the next word of `rest`. Raises NotUnderstood."""
    name, equals, value = word.partition("=")
    one = options.get(name)
    if one is None or (equals and (one.type is bool or not name.startswith("--"))):
        raise NotUnderstood
    if one.type is bool:
        return one, name
    if not equals and not rest:
        raise NotUnderstood
    given = value if equals else rest.pop(0)
    if given.startswith("-"):
        raise NotUnderstood
    return one, given


@dataclass(frozen=True)
class _Parameter:
    name: str
    type: Any
    what: Option | Argument
    optional: bool

    def switches(self) -> list[str]:
        """Return the words that name it on a command line."""
        return [word for names in self.what.names for word in names.split("/")] if isinstance(self.what, Option) else []

    def read(self, given: str) -> Any:
        """Return the value of a word. Raises NotUnderstood."""
        if self.type is bool:
            return not any(given == names.partition("/")[2] for names in self.what.names)  # type: ignore[union-attr]
        try:
            value = self.type(given)
        except ValueError:
            raise NotUnderstood from None
        least = self.what.least if isinstance(self.what, Option) else None
        if least is not None and not value >= least:
            raise NotUnderstood
        return value

    def from_environment(self) -> str | None:
        variable = self.what.envvar if isinstance(self.what, Option) else None
        return os.environ.get(variable) or None if variable else None


def _declared(command: Callable[..., Any]) -> list[_Parameter]:
    """Return the parameters of a command. Raises NotUnderstood for one of an unknown type or declaration."""
    hints = get_type_hints(command, include_extras=True)
    names = command.__code__.co_varnames[: command.__code__.co_argcount]
    required = len(names) - len(command.__defaults__ or ())
    parameters = []
    for place, name in enumerate(names):
        what = _declaration(hints[name])
        type = get_args(hints[name])[0] if what is not None else None
        if what is None or type is None or not (type in (str, float, bool) or issubclass(type, StrEnum)):
            raise NotUnderstood
        parameters.append(_Parameter(name, type, what, place >= required))
    return parameters


def _declaration(hint: Any) -> Option | Argument | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((one for one in get_args(hint)[1:] if isinstance(one, Option | Argument)), None)
