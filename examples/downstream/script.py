"""The command line that the scripts of this folder have in common."""

import argparse
from collections.abc import Callable, Sequence

from pier_megatron.cli import carried_out


def main_of(
    purpose: str | None, add_arguments: Callable[[argparse.ArgumentParser], None], run: Callable[[argparse.Namespace], int]
) -> Callable[..., int]:
    """Makes what runs a script with some words, by default those of its command line, and returns the exit status."""

    def main(words: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_arguments(parser)
        return carried_out(run, parser.parse_args(words))

    return main
