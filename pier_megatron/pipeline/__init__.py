"""Which micro-batch visits which pipeline stage, and how long a step then takes; plain Python, without Megatron."""
