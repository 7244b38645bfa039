"""Orders and routes of micro-batches through a pipeline as data, and how long a step takes with them; nothing of Megatron."""
