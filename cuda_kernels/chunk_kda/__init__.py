"""chunk_kda for NVIDIA GPUs: CUDA sources, and the calls of their operators."""
