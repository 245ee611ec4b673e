"""Runs every instance of the native op's kernels once or twice on small shapes, for compute-sanitizer to watch.

    for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool $tool --kernel-name kernel_substring=wy_dqkg --error-exitcode 9 \\
            python ci/sanitize_cuda.py
    done

Needs an NVIDIA GPU and the native library. Inputs are made on the host: initcheck follows copies, but not the kernels
that the filter leaves out. Results are judged by tests/cuda/test_wy_cuda.py, not here.
"""

from __future__ import annotations

import torch

from mindspeed_kda import chunk_kda_bwd_wy_dqkg_fused as op
from mindspeed_kda.testing.inputs import wy_inputs


def main() -> None:
    for main_dtype in (torch.float16, torch.bfloat16, torch.float32):
        for state in dict.fromkeys((main_dtype, torch.float32)):
            for K in (64, 100, 128):
                for shape in ({"T": 70}, {"T": 69, "lengths": [65, 0, 3], "BT": 32}):
                    kwargs = wy_inputs(H=1, HV=2, K=K, V=K, dtype=main_dtype, state_dtype=state, seed=K, **shape)
                    on_device = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
                    out = op(**on_device, backend="cuda")
                    torch.cuda.synchronize()
                    print(main_dtype, state, K, shape, float(out.dq.cpu().abs().sum()), flush=True)


if __name__ == "__main__":
    main()
