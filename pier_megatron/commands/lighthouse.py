"""``pier-megatron lighthouse``: the rendezvous server at which elastic islands find each other, torchft's lighthouse."""

import argparse
import resource
import signal
import threading

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.authentication import new_secret
from pier_megatron.values import LAST_PORT, LONGEST, address, file_to_write, whole

_FILES = resource.RLIMIT_NOFILE

# Open files that the lighthouse needs besides one for each connection.
_OWN_FILES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--islands", type=whole(1), metavar="N", help="largest number of islands, as --pier-groups")
    what.add_argument(
        "--new-secret",
        type=file_to_write,
        metavar="FILE",
        help="write a random secret for --pier-secret-file to a new file, and end",
    )
    parser.add_argument(
        "--min-islands",
        type=whole(1),
        metavar="N",
        help="smallest number of islands that form a quorum; with half of --islands or fewer, islands that lose contact may "
        "continue as two runs. Default: more than half",
    )
    parser.add_argument(
        "--address", type=address, default="127.0.0.1", help="address to listen at. Default: %(default)s, this machine only"
    )
    parser.add_argument(
        "--port", type=whole(0, LAST_PORT), default=29510, help="port to listen at; 0 for any. Default: %(default)s"
    )
    parser.add_argument(
        "--join-timeout",
        type=whole(1, LONGEST),
        default=600,
        metavar="SECONDS",
        help="time that islands at an outer step wait for others that are alive; longer than any island trains between two "
        "outer steps. Default: %(default)s",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=whole(1, LONGEST),
        default=5,
        metavar="SECONDS",
        help="silence after which an island counts as dead. Default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, or writes a secret.

    Raises:
        PierConfigError: If it cannot listen, torchft is missing, or the secret's file cannot be created.
    """
    if options.new_secret is not None:
        new_secret(options.new_secret)
        print(f"--pier-secret-file {options.new_secret}: copy it to all islands")
        return 0
    least = more_than_half(options.islands) if options.min_islands is None else options.min_islands
    if least > options.islands:
        raise PierConfigError(f"--min-islands {least}: must be from 1 to --islands {options.islands}.")
    _allow_connections(options.islands)
    from pier_megatron.exchange.torchft_api import keep_quiet, torchft

    keep_quiet(options.islands)
    try:
        server = torchft("coordination").LighthouseServer(
            bind=f"{options.address}:{options.port}",
            min_replicas=least,
            join_timeout_ms=1000 * options.join_timeout,
            heartbeat_timeout_ms=1000 * options.heartbeat_timeout,
        )
    except RuntimeError as error:
        raise PierConfigError(
            f"--address {options.address} --port {options.port}: cannot listen there: {error}. Give an address of this node "
            "and a free port."
        ) from error
    port = server.address().rpartition(":")[2]
    # In a URL an IPv6 address stands in brackets.
    host = f"[{options.address}]" if ":" in options.address else options.address
    print(f"--pier-lighthouse http://{host}:{port}: for up to {options.islands} islands, at least {least}", flush=True)
    if least < more_than_half(options.islands):
        print(
            f"WARNING: --min-islands {least} of --islands {options.islands}, half or fewer: an island that starts without "
            "--load while the others are gone begins a run of its own, from random weights.",
            flush=True,
        )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    server.shutdown()
    return 0


def more_than_half(islands: int) -> int:
    """The default of ``--min-islands``: of two halves that do not see each other, one at most continues."""
    return islands // 2 + 1


def _allow_connections(islands: int) -> None:
    """Raises this process's limit of open files to what the islands need.

    A lighthouse that reaches its limit closes its port, says nothing, and is lost to all islands.

    Raises:
        PierConfigError: If the limit cannot be raised so far.
    """
    # The old connection of a restarted island may still be open.
    needed = 2 * islands + _OWN_FILES
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_FILES))
    if hard < needed:
        raise PierConfigError(
            f"--islands {islands}: the lighthouse needs up to {needed} open files (2 x {islands} connections + {_OWN_FILES}), "
            f"but this process may open {hard} (ulimit -Hn). Raise the hard limit, or pass fewer --islands."
        )
    if soft < needed:
        resource.setrlimit(_FILES, (needed, resource.getrlimit(_FILES)[1]))
