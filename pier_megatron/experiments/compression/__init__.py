"""Hybrid compression (arXiv 2409.02423): what Megatron sends inside a group, in fewer bytes, one module per dimension."""
