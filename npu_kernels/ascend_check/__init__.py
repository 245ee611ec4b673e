"""The compile gate: every Triton kernel through the BiSheng compiler up to its memory plan, without an NPU.

``spec`` says what to compile (protocol of the providers), ``compile`` does it, ``rules`` judges, ``matrix`` walks the
support matrix, ``report`` prints. Neither hivmc (HIVM to device object) nor silicon is involved. Imports no triton by
itself; ``python -m mindspeed_kda ascend-check`` is the command.
"""
