"""Fixtures shared by all tests."""

import os
import random
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parent / "distributed"))

import one_gpu

# The cores belong to the processes that tests start; threads of this one that wait for each other are in their way.
torch.set_num_threads(1)

# A busy machine is no failure.
hypothesis.settings.register_profile("pier", deadline=None)
hypothesis.settings.load_profile("pier")

_CHOSEN = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        help="where the outer loop and the exchange are tested; by default on a GPU if there is one",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CHOSEN] = one_gpu.choose(config.getoption("--device"))
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            # As in the background of a script, or under nohup; jobs that tests interrupt would inherit it.
            signal.signal(number, usual)
    # Before workers start, which inherit it.
    os.environ.setdefault("PIER_TEST_SEED", str(random.randrange(10**6)))
    if one_gpu.device().type == "cpu":
        # Before anything imports Triton: its kernels then run in its interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        # While it can be seen: some folders hide it from what they start.
        torch.cuda.init()


def pytest_report_header(config: pytest.Config) -> str:
    seed = os.environ["PIER_TEST_SEED"]
    return f"outer loop and exchange on: {config.stash[_CHOSEN]}; new random lives: PIER_TEST_SEED={seed} repeats them"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text that is the same on every machine, in Megatron's indexed format: train and validation dataset."""
    from pier_megatron.commands.demo.corpus import write_documents

    folder, text = tmp_path_factory.mktemp("corpus"), Path(__file__).parents[1] / "LICENSE"
    return write_documents(folder / "train", [text]), write_documents(folder / "validation", [text])
