"""Entropy of 2-bit codes: ``python study/entropy.py [--iterations N]`` prints what an ideal entropy coder would save.

Codes of the pseudo-gradients and of the sums that come back, of 8 groups that exchange ``int2`` every 30 iterations.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import torch
from codings import CODINGS
from frontier_runs import annealed
from rows import ADAM, MUON
from small_gpt import Text
from text import data_arguments
from together import train_together
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.exchange.coding import encode

_CODES = 4


def entropy(counts: list[int]) -> float:
    """Bits that a code of these frequencies takes."""
    total = sum(counts)
    return -sum(count / total * math.log2(count / total) for count in counts if count)


def main() -> None:
    """Trains with each inner optimizer and counts codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=900, help="length of each training (%(default)s)")
    parser.add_argument("--corpus", type=Path, default=Path("runs/study/corpus"), help="folder of the text (%(default)s)")
    options = parser.parse_args()
    data_arguments(options.corpus.resolve())
    torch.set_num_threads(1)
    codec, coding = CODECS["int2"], CODINGS["int2"]
    for inner in (MUON, ADAM):
        counts = [0] * _CODES

        def arrives(rows: Tensor, counts: list[int] = counts) -> Tensor:
            whole = rows[:, : rows.shape[1] // BLOCK * BLOCK].contiguous()
            integers = encode(codec, whole)[:, : whole.shape[1] * codec.bits // 8]
            for place in range(0, 8, codec.bits):
                found = ((integers >> place) & (_CODES - 1)).flatten().int().bincount(minlength=_CODES)
                counts[:] = [sum(each) for each in zip(counts, found.tolist(), strict=True)]
            return coding.arrives(rows)

        run = dataclasses.replace(
            annealed(inner, 30, "int2"), groups=8, iterations=options.iterations, layers=1, width=16, batch=32
        )
        CODINGS["int2"] = dataclasses.replace(coding, arrives=arrives)
        train_together([run], Text(options.corpus.resolve()))
        scale = coding.bits - codec.bits
        coded = entropy(counts) + scale
        print(f"{inner}: {coded:.2f} bits an element instead of {coding.bits:.3f}, {1 - coded / coding.bits:.0%} less")


if __name__ == "__main__":
    main()
