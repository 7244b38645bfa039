"""What the plugin adds to Megatron's checkpoints."""
