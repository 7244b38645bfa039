"""``pier-megatron lighthouse``: where islands that are jobs of their own find each other, torchft's lighthouse."""

import argparse
import signal
import threading

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.authentication import new_secret
from pier_megatron.values import LAST_PORT, LONGEST, address, file_to_write, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--islands", type=whole(1), metavar="N", help="how many islands there may be, --pier-groups")
    what.add_argument(
        "--new-secret",
        type=file_to_write,
        metavar="FILE",
        help="only write a random secret to a new file, for --pier-secret-file of all islands",
    )
    parser.add_argument(
        "--min-islands",
        type=whole(1),
        metavar="N",
        help="how many have to be there for an outer step; with at most half of --islands, parts that lose sight of each other "
        "can go on apart. Default: more than half",
    )
    parser.add_argument(
        "--address", type=address, default="127.0.0.1", help="at which to listen. Default: %(default)s, this machine only"
    )
    parser.add_argument("--port", type=whole(0, LAST_PORT), default=29510, help="Default: %(default)s; 0 for any")
    parser.add_argument(
        "--join-timeout",
        type=whole(1, LONGEST),
        default=600,
        metavar="SECONDS",
        help="how long those who have come to an outer step wait for islands that are alive and do not come: longer than any "
        "island trains between two of them. Default: %(default)s",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=whole(1, LONGEST),
        default=5,
        metavar="SECONDS",
        help="after which an island that is not heard of is given up. Default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to end, or makes a secret.

    Raises:
        PierConfigError: If it cannot listen, torchft is missing, or the secret's file cannot be created.
    """
    if options.new_secret is not None:
        new_secret(options.new_secret)
        print(f"--pier-secret-file {options.new_secret}: copy it to all islands")
        return 0
    least = options.islands // 2 + 1 if options.min_islands is None else options.min_islands
    if least > options.islands:
        raise PierConfigError(f"--min-islands {least}: must be from 1 to --islands {options.islands}.")
    from pier_megatron.exchange.membership import torchft

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
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    server.shutdown()
    return 0
