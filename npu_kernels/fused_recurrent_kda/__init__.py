"""Triton kernel of fused_recurrent_kda: plan.run(call) launches it."""
