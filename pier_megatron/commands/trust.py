"""What every command that reads a checkpoint says in its ``--help``."""

TRUSTED_ONLY = "Reading a checkpoint unpickles parts of it, which can run code that is in them: use trusted checkpoints only."
