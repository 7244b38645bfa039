"""Micro-batches that skip pipeline stages (SkipPipe, arXiv 2502.19913)."""
