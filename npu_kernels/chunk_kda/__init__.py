"""The stages of ``chunk_kda``, forward and backward, and their plan."""
