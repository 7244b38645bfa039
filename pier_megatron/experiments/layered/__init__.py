"""Breadth-first pipelines (arXiv 2106.02679, 2211.05953)."""
