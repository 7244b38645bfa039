"""What the console command `pier-megatron` offers, one module or folder a subcommand."""
