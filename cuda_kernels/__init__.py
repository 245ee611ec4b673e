"""Native CUDA kernels, built by ``build.py``. Importing this loads no library and needs no GPU."""
