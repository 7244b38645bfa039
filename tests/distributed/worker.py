"""A launch of trainings: ``python -m worker SPECIFICATION DIRECTORY WORLD_SIZE``, see ``recorder.py``.

Megatron's checkpoint writers import the main module once more, in a new process for each save: it had better be short.
"""

if __name__ == "__main__":
    import sys

    import forked_ranks
    from recorder import main

    forked_ranks.run(int(sys.argv[3]), main)
