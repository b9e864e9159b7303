"""What the documentation may use of `ctr` and `crictl`: subcommands and their flags, True for one with a value.

System tests compare them with the real programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Commands = Mapping[tuple[str, ...], Mapping[str, bool]]

CTR: Commands = {
    ("images", "import"): {},
    ("images", "pull"): {},
    ("run",): {"-d": False, "--runtime": True, "--log-uri": True},
}
CRICTL: Commands = {("checkpoint",): {"--export": True}}


def accepted(commands: Commands, words: Sequence[str]) -> None:
    """Fail where a command line has a subcommand or a flag that is not known."""
    found = [name for name in commands if tuple(words[1 : 1 + len(name)]) == name]
    assert found, f"no test knows {words}"
    rest = list(words[1 + len(found[0]) :])
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        assert flag in commands[found[0]], f"no test knows {flag} of {words}"
        if commands[found[0]][flag]:
            rest.pop(0)
    assert rest, f"{words} names nothing"
