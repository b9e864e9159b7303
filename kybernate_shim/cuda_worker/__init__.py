"""The CUDA helper's workers, processes of their own, and the only code that loads `cuda.bindings` and libcuda."""
