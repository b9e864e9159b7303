"""A container of its own for each story."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.task.container.stories import Story, Tell
from tests.unit.task.runtime import Life


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """Run a story with a container of its own and return the container's life."""

    def run(story: Story, **options: Any) -> Life:
        async def work() -> Life:
            life = Life(tmp_path, **options)
            await asyncio.wait_for(story(life), 10)
            return life

        return asyncio.run(work())

    return run
