"""What programs around a runtime rely on, under our shim and under containerd's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.ctr import BUNDLES, STOCK, CommandFailed, Ctr
from tests.system.programs import script

Use = Callable[[Path], list[str]]


@pytest.fixture
def use(ctr: Ctr, shim_config: Path) -> Use:
    """Return the flags of `ctr run` with which the shim executes the given program as its OCI runtime."""

    def flags(runtime: Path) -> list[str]:
        if ctr.runtime == STOCK:
            return ["--runc-binary", str(runtime)]
        shim_config.write_text(f'runtime = "{runtime}"\n')
        return []

    return flags


def test_runtime_runs_in_the_bundle(ctr: Ctr, use: Use, tmp_path: Path) -> None:
    """Wrappers of runc read ./config.json; the files of the bundle are there from the first call to the last."""
    seen = tmp_path / "seen"
    wrapper = script(
        tmp_path / "wrapper",
        "for word; do case $word in create|start|exec|kill|delete) verb=$word;; esac; done\n"
        f'[ -f config.json ] && echo "$verb $PWD" >> {seen}\nexec runc "$@"',
    )
    id = ctr.new_id()
    with ctr.running("sleep", "1000", flags=use(wrapper), id=id):
        ctr.exec(id, "true")
    bundle = BUNDLES / ctr.namespace / id
    verbs = ("create", "start", "exec", "kill", "delete")
    assert set(seen.read_text().splitlines()) == {f"{verb} {bundle}" for verb in verbs}


def test_reason_of_a_failed_create_is_told_when_its_undo_fails_too(ctr: Ctr, use: Use, tmp_path: Path) -> None:
    fails = script(
        tmp_path / "fails",
        'for word; do [ "$before" = --log ] && log=$word; [ "$word" = create ] && verb=create; before=$word; done\n'
        """[ "$verb" ] && echo '{"level":"error","msg":"no room for it"}' >> "$log"\nexit 1""",
    )
    with pytest.raises(CommandFailed, match=r"OCI runtime create failed.*no room for it"):
        ctr.run("true", flags=use(fails))
