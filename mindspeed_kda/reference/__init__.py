"""The definition of every op in eager PyTorch: any float dtype up to float64, any device, chunked and vectorised.

Readable before fast. Kernels never import it; tests, ``verify`` and the ``torch`` backend do.
"""
