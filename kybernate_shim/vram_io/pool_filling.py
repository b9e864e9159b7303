"""`pool_filling` for the CUDA helper of an older release; see cuda.py."""

import sys

from kybernate_shim.vram_io.image_pool_filling import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
