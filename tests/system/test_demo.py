"""`make demo`, which everyone who comes sees first, says nothing that is not so."""

from __future__ import annotations

import pytest

from tests.system import demo


def test_demo_is_told_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert "nothing is left of it" in capsys.readouterr().out
