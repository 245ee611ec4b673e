"""One module per public op: signature, checks, output shapes, result type and byte count.

Backends, fakes, tests and benchmarks derive from these modules and repeat none of it. Torch only: no device queries,
no allocation.
"""
