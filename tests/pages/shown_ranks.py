"""Trains command lines one after the other, each in two ranks of its own: ``python shown_ranks.py SCRIPT FOLDER``.

``FOLDER/lines.json`` holds the arguments of each. This process only imports Megatron, as each rank would; it leaves
``FOLDER/lineN.txt`` behind.
"""

import importlib
import json
import sys
from pathlib import Path

import forked_ranks

from pier_megatron import launcher
from pier_megatron.cpu import emulation


def train(script: str, arguments: list[str], log: Path) -> None:
    """Becomes one rank of a training."""
    with log.open("a") as output:
        sys.stdout = sys.stderr = output
        launcher.main(["--device", "cpu", script, *arguments])


if __name__ == "__main__":
    script, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(Path(script).parent))
    emulation.install()
    # What every rank would import by itself.
    for module in ("megatron.training", "torch._dynamo", "torch.onnx", "pier_megatron.integration.seams"):
        importlib.import_module(module)
    for number, line in enumerate(json.loads((folder / "lines.json").read_text())):
        forked_ranks.run(2, lambda line=line, number=number: train(script, line, folder / f"line{number}.txt"))
