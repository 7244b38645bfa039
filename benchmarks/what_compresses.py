"""What codecs and general compressors take off the traffic inside a group.

``torchrun --standalone benchmarks/what_compresses.py`` trains a small GPT in BF16, real Megatron on the CPU, and takes
the numbers of its last iteration: what a layer hands to the next, the gradient that comes back, gradients of parameters
and parameters. It prints for each codec the bytes relative to BF16 and the relative error, as root mean squares of all
numbers. Lossless: zlib on BF16 as it lies in memory, and on its high and its low bytes apart, which compresses
floating-point numbers best.
"""

import functools
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from pier_megatron.cpu import emulation
from pier_megatron.cpu.preparations import missing_cpu_flags

emulation.install()

import torch  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.training import training as megatron_training  # noqa: E402

from pier_megatron import register  # noqa: E402
from pier_megatron.commands.demo import corpus, pretrain_bytes  # noqa: E402
from pier_megatron.exchange.codecs import BLOCK, CODECS  # noqa: E402
from pier_megatron.exchange.coding import decode, encode  # noqa: E402
from pier_megatron.integration import seams  # noqa: E402
from pier_megatron.megatron_api.seam import install  # noqa: E402

_ITERATIONS = 400
_MODEL = (
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --bf16 "
    "--micro-batch-size 8 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer "
    f"--vocab-size 257 --make-vocab-size-divisible-by 16 --lr 1e-3 --lr-decay-style constant --train-iters {_ITERATIONS} "
    "--log-interval 100 --eval-interval 1000 --eval-iters 0"
)

_CODECS = ("int12", "int8", "int4")

type Taken = dict[str, list[torch.Tensor]]


def main() -> None:
    """Trains, and prints the table."""
    taken: Taken = {}
    install(seams.WITHOUT_PIER)
    register()
    with tempfile.TemporaryDirectory() as scratch:
        train, validation = corpus.write(Path(scratch) / "corpus")
        paths = f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation}"
        argv = f"{_MODEL} {paths}".split()
        sys.argv = [pretrain_bytes.__file__, *argv, *missing_cpu_flags(argv)]
        _take(taken)
        pretrain_bytes.main()
    lossless = "BF16, zlib | BF16, zlib by bytes"
    print(f"\n| | {lossless} | {' | '.join(f'{name}: bytes | error' for name in ('bf16', *_CODECS))} |")
    print("|---" * (3 + 2 * (1 + len(_CODECS))) + "|")
    for what, tensors in taken.items():
        print(f"| {what} | {' | '.join(_row(torch.cat([tensor.flatten() for tensor in tensors])))} |")


def _take(taken: Taken) -> None:
    """Keeps what is looked at of the last iteration."""
    train_step, run_layer = megatron_training.train_step, TransformerLayer.forward
    now = 0

    @functools.wraps(train_step)
    def taking(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now = kwargs["iteration"]
        result = train_step(*args, **kwargs)
        if now == _ITERATIONS - 1:
            layers = [
                parameter for name, parameter in args[2][0].named_parameters() if "layers" in name and parameter.dim() == 2
            ]
            taken["gradients of parameters"] = [parameter.main_grad.clone() for parameter in layers]
            taken["parameters"] = [parameter.detach().float() for parameter in layers]
        return result

    @functools.wraps(run_layer)
    def running(*args: Any, **kwargs: Any) -> Any:
        result = run_layer(*args, **kwargs)
        if now == _ITERATIONS - 1:
            taken.setdefault("activations between layers", []).append(result[0].detach().float())
            back = taken.setdefault("gradients of activations", [])
            result[0].register_hook(lambda gradient: back.append(gradient.float()))
        return result

    megatron_training.train_step, TransformerLayer.forward = taking, running


def _row(numbers: torch.Tensor) -> list[str]:
    rows = numbers[: numbers.numel() // BLOCK * BLOCK][None]
    halves = rows.to(torch.bfloat16).view(torch.uint8).view(-1, 2)
    whole, apart = (
        sum(len(zlib.compress(part.contiguous().numpy().tobytes(), 9)) for part in parts) / halves.numel()
        for parts in ([halves], halves.unbind(1))
    )
    cells = [f"{whole:.2f}", f"{apart:.2f}"]
    for codec in (CODECS[name] for name in ("bf16", *_CODECS)):
        error = (decode(codec, encode(codec, rows.clone())) - rows).norm() / rows.norm()
        cells += [f"{codec.nbytes(BLOCK) / BLOCK / 2:.2f}", f"{error:.1e}"]
    return cells


if __name__ == "__main__":
    main()
