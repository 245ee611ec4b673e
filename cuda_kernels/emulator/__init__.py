"""A host build of the CUDA kernels: see docs/cuda.md."""
