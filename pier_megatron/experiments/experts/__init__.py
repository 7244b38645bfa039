"""``pier-megatron experts``: ensembles of experts that never talk, one Megatron job each (HDEE, arXiv 2502.19385)."""
