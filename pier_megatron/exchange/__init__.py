"""Exchange between groups: rank placement, collectives, numbers in fewer bits. Without Megatron."""
