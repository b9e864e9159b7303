"""Containers that compute on pretended GPUs, and the node's side of it: the driver, the GPUs, the helper.

with gpu.computing(ctr) as container:
    container.computes_on()
"""

from __future__ import annotations

from tests.system.gpu.node import (
    CAPABILITY,
    COMPUTES,
    CONFIG,
    GPUS,
    INSIDE,
    PROGRAMS,
    SOCKET,
    forget_helper,
    heal,
    helpers,
    install_driver,
    kill_helpers,
    node_with_arena,
    noted_as_locked,
    open_files,
    other_model,
    remove_driver,
)
from tests.system.gpu.programs import (
    Computing,
    Holding,
    ask_shim,
    begun,
    both,
    command,
    computing,
    computing_again,
    holding,
    holding_again,
    mounts,
)
from tests.system.gpu.toolkit import visible

__all__ = [
    "CAPABILITY",
    "COMPUTES",
    "CONFIG",
    "GPUS",
    "INSIDE",
    "PROGRAMS",
    "SOCKET",
    "Computing",
    "Holding",
    "ask_shim",
    "begun",
    "both",
    "command",
    "computing",
    "computing_again",
    "forget_helper",
    "heal",
    "helpers",
    "holding",
    "holding_again",
    "install_driver",
    "kill_helpers",
    "mounts",
    "node_with_arena",
    "noted_as_locked",
    "open_files",
    "other_model",
    "remove_driver",
    "visible",
]
