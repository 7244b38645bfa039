"""Holds a network namespace for as long as this process runs: ``python namespace.py [PID]``.

With the PID of another holder it is made in that one's user namespace. It ends with its standard input, hence with whoever
started it. This file imports nothing of the package: its process shall start at once, and have one thread.
"""

import os
import sys

READY = "ready"
"""What a holder says once its namespace is there."""


def enter(holder: int) -> None:
    """Moves this process, which must have one thread, into the namespaces of a holder."""
    for kind in ("user", "net"):
        path = f"/proc/{holder}/ns/{kind}"
        if os.stat(path).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        os.setns(descriptor)
        os.close(descriptor)


def _leave() -> None:
    """Moves this process into a network namespace of its own; without root it becomes root of a user namespace for that."""
    try:
        os.unshare(os.CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        enter(int(sys.argv[1]))
    _leave()
    print(READY, flush=True)
    sys.stdin.read()
