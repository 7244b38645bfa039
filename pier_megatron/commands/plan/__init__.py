"""`pier-megatron plan`."""
