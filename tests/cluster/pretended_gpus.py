"""Gives a node of the cluster a pretended driver with two GPUs. Run inside the node, as a program of its own."""

from __future__ import annotations

import sys

from tests.system.gpu.node import forget_helper, install_driver, remove_driver


def main(argv: list[str]) -> int:
    if argv == ["install"]:
        install_driver()
    else:
        forget_helper()
        remove_driver()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
