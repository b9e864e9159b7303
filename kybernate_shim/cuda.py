"""Modules under their names of before, for processes of an older release that outlive an upgrade of its files.

A daemon, the CUDA helper and its workers start programs by `python -m`: an old one asks for a name from here. Nothing
of ours imports this module.
"""

import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent
_FOLDERS = {
    "": ("cuda_helper", "cuda_worker"),  # helper, worker
    ".arena": ("cuda_worker", "cuda_holder"),  # kernel, holder
    ".vram": ("vram_mover", "vram_io"),  # worker, pool_filling
}

for _name, _folders in _FOLDERS.items():
    _module = sys.modules.setdefault(f"{__name__}{_name}", ModuleType(f"{__name__}{_name}"))
    _module.__path__ = [str(_PACKAGE / folder) for folder in _folders]
