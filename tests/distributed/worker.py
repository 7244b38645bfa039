"""What forks the launches of tests: ``python worker.py RECORDER``, then a line of JSON for each, see ``launch.Server``.

It imports once what would take every launch many seconds. Megatron's checkpoint writers import the main module once more, in a
new process for each save: it had better be short.

Answers each line with the exit status of its launch.
"""

if __name__ == "__main__":
    import gc
    import importlib
    import json
    import os
    import sys

    # What is printed while Megatron is imported is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import forked_ranks

    main = importlib.import_module(sys.argv[1]).main
    # Every run ends with a collection, which need not look at all of this again.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = [__file__, job["specification"], job["directory"]]
            forked_ranks.run(job["world_size"], main)
            sys.exit()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
