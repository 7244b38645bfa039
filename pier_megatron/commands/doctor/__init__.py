"""``pier-megatron doctor``: what a job will be, and what keeps it from starting."""
