"""Triton kernels: Ascend first, the same source on stock Triton and in the interpreter. Imports no triton by itself."""
