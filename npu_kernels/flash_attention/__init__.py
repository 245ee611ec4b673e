"""Softmax attention, forward and backward, in Triton."""
