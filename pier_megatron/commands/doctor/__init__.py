"""`pier-megatron doctor`."""
