"""A GPT on the bytes of Python's standard library: ``pier-megatron demo``, and what the tests train."""
