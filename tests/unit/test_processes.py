"""How a process ends that is interrupted while it ends for another reason."""

import subprocess
import sys

import pytest

from pier_megatron.processes import INTERRUPTED

# The other rank was interrupted first, so that this one ends by an error of a collective; then its own signal is seen.
_ENDING = """
import signal, sys
from pier_megatron.processes import end_with_one_message
sys.excepthook = lambda *_: signal.raise_signal(signal.SIGINT)
end_with_one_message()
raise {error}
"""


@pytest.mark.parametrize("error", ["RuntimeError('connection closed by peer')", "KeyboardInterrupt"])
def test_an_interrupted_process_says_so_once(error: str) -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDING.format(error=error)], capture_output=True, text=True)
    assert ended.returncode == INTERRUPTED
    assert ended.stderr.startswith("Pier: interrupted; what was not saved is lost")
    assert "Traceback" not in ended.stderr
