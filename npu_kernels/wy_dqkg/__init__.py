"""The six stages of ``chunk_kda_bwd_wy_dqkg_fused``."""
