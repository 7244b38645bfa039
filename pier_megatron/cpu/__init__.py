"""Megatron-LM on a machine without a GPU: what stands in for CUDA, and the launcher that puts it in place."""
