"""Runs a training script unchanged, with ``--optimizer pier`` known to it.

Also what the helper processes of Megatron import: ``multiprocessing`` re-imports the main module in each process that it
spawns (checkpoint writers, for one), and they need what the script's module level needs.
"""

import argparse
import importlib.machinery
import multiprocessing
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pier_megatron.cpu.preparations import missing_cpu_flags
from pier_megatron.errors import PierConfigError
from pier_megatron.flags import check_words
from pier_megatron.processes import REFUSED, end_with_one_message, rank, refusal

if TYPE_CHECKING:
    from pier_megatron.megatron_api.seam import Seam

# Carry what helper processes cannot see: importing this module as their main one overwrites their sys.argv[0].
_DEVICE_VARIABLE = "PIER_MEGATRON_DEVICE"
_SCRIPT_VARIABLE = "PIER_MEGATRON_SCRIPT"


def parser() -> argparse.ArgumentParser:
    """Builds the parser of ``[--device cuda|cpu] SCRIPT ARGUMENTS...``."""
    parser = argparse.ArgumentParser(
        prog="python -m pier_megatron",
        description="Runs a Megatron-LM training script unchanged, with --optimizer pier known to it.",
        usage="%(prog)s [--device {cuda,cpu}] SCRIPT [ARGUMENTS ...]",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda (default): run on GPUs; cpu: run Megatron on the CPU and gloo, to try things out",
    )
    parser.add_argument(
        "script", metavar="SCRIPT", help="training script, such as the pretrain_gpt.py of a Megatron-LM checkout"
    )
    parser.add_argument(
        "arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of the script, with --optimizer pier"
    )
    return parser


def main(argv: Sequence[str], rows: "Sequence[Seam]" = ()) -> None:
    """Runs a script as the words say, with what ``rows`` replace of Megatron's besides."""
    understood = parser()
    options = understood.parse_args(argv)
    end_with_one_message()
    script = Path(options.script)
    if not script.is_file():
        understood.error(f"SCRIPT {options.script}: {'a folder, not a file' if script.is_dir() else 'no such file'}")
    try:
        check_words(options.arguments)
    except PierConfigError as error:
        # All ranks find the same here.
        understood.exit(REFUSED, refusal(error) if rank() == 0 else None)

    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        understood.error(
            f"--device {options.device}: PyTorch {torch.__version__} finds no CUDA device. To try Megatron and Pier on the "
            "CPU, which is slow, pass --device cpu before SCRIPT."
        )
    os.environ[_DEVICE_VARIABLE] = options.device
    os.environ[_SCRIPT_VARIABLE] = str(script.resolve())
    sys.argv = [options.script, *options.arguments]
    if options.device == "cpu":
        added = missing_cpu_flags(options.arguments)
        if added and os.environ.get("RANK", "0") == "0":
            print(
                f"--device cpu trains without Transformer Engine, Apex and compiled kernels, and adds: {' '.join(added)}",
                flush=True,
            )
        sys.argv += added
    _prepare(script, rows)
    _run_as_main(script)


def _prepare(script: Path, rows: "Sequence[Seam]" = ()) -> None:
    """Sets up this process as ``python SCRIPT`` would, and makes Pier known to the Megatron that it would import."""
    sys.path[0] = str(script.resolve().parent)
    if os.environ.get(_DEVICE_VARIABLE) == "cpu":
        from pier_megatron.cpu import emulation

        # Megatron asks for it with tensor parallelism.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        emulation.install()
    from pier_megatron.integration import seams
    from pier_megatron.megatron_api.seam import install

    install((*seams.WITHOUT_PIER, *rows))
    seams.register()


def _run_as_main(script: Path) -> None:
    """Runs the script as ``__main__``.

    Unlike ``runpy.run_path``, this puts the present module into ``__spec__``; spawned processes of ``multiprocessing`` import
    the module named there.
    """
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __file__=str(script), __spec__=importlib.machinery.ModuleSpec(__name__, None), __builtins__=__builtins__
    )
    # Under the second name helper processes know what they send back of the script's.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    _execute(script, main_module.__dict__)


def _execute(script: Path, namespace: dict[str, object]) -> None:
    exec(compile(script.read_bytes(), str(script), "exec"), namespace)


def _be_script(namespace: dict[str, object]) -> None:
    """Gives a helper process what the script defines at module level."""
    script = Path(os.environ[_SCRIPT_VARIABLE])
    # Scripts use it to find files in their own folder.
    namespace["__file__"] = str(script)
    _prepare(script)
    _execute(script, namespace)


def _look_in_script(name: str) -> object:
    """The main module's ``__getattr__`` in a helper: becomes the script when something of it is asked for."""
    main_module = sys.modules["__main__"]
    if name.startswith("__"):
        raise AttributeError(name)
    del main_module.__getattr__
    _be_script(main_module.__dict__)
    return getattr(main_module, name)


if __name__ == "__mp_main__":
    from pier_megatron.integration.checkpoint.helpers import end_with_parent

    # A helper process: what the script defines at module level may be unpickled here.
    end_with_parent()
    if multiprocessing.current_process().name.startswith("SyncManager"):
        # Every rank starts such a server with its first save. It hands on what others send each other, hardly ever anything of
        # the script's, and importing Megatron would take it seconds.
        __getattr__ = _look_in_script
    else:
        _be_script(globals())
