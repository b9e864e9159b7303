"""The names of containers whose records containerd cannot send: found by lists of fewer and fewer. Without I/O.

containerd's lists are selected by expressions over ids, and an error of a list says that a record is too large, but not
which. Ids are letters, digits and `._-`, at most 76 of them (containerd's pkg/identifiers), and so a record is found by
some hundred questions.
"""

from __future__ import annotations

from collections.abc import Callable

LETTERS = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
LONGEST = 76

Fails = Callable[[str], bool]  # whether the list of ids that match an expression cannot be sent


def hidden(fails: Fails) -> str | None:
    """Return the id of one record that cannot be sent, None where all can be.

    `fails` may be asked with any regular expression of ids, in RE2's syntax.
    """
    prefix = ""
    while len(prefix) < LONGEST:
        letter = _letter(prefix, fails)
        if not letter:
            return prefix or None
        prefix += letter
    return prefix


def _letter(prefix: str, fails: Fails) -> str:
    """Return the letter that follows `prefix` in an id that cannot be sent; "" where none does."""
    letters = LETTERS
    if not fails(f"^{_quoted(prefix)}[{_quoted_class(letters)}]"):
        return ""
    while len(letters) > 1:
        first, second = letters[: len(letters) // 2], letters[len(letters) // 2 :]
        letters = first if fails(f"^{_quoted(prefix)}[{_quoted_class(first)}]") else second
    return letters


def _quoted(text: str) -> str:
    return text.replace(".", "[.]")


def _quoted_class(letters: str) -> str:
    """Return letters for a class, where a `-` is itself at the begin alone."""
    return ("-" if "-" in letters else "") + letters.replace("-", "")
