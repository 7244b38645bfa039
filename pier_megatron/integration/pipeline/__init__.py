"""What happens between the pipeline stages of a group; nothing of it needs ``--optimizer pier``."""
