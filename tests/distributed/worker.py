"""One process of a test launch: ``torchrun worker.py SPECIFICATION DIRECTORY``; see ``recorder.py``.

Megatron's checkpoint writers import the main module once more, in a new process for each save: it had better be short.
"""

if __name__ == "__main__":
    from recorder import main

    main()
