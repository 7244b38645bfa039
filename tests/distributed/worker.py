"""A launch of trainings: ``python -m worker RECORDER SPECIFICATION DIRECTORY WORLD_SIZE``, see ``recorder.py``.

Megatron's checkpoint writers import the main module once more, in a new process for each save: it had better be short.
"""

if __name__ == "__main__":
    import importlib
    import sys

    import forked_ranks

    recorder = sys.argv.pop(1)
    forked_ranks.run(int(sys.argv[3]), importlib.import_module(recorder).main)
