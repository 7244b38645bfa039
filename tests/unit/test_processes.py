"""How a process ends that is interrupted while it ends for another reason."""

import subprocess
import sys

import pytest

from pier_megatron.processes import INTERRUPTED

# By a signal that is seen only when the hook runs: it came during a collective, or while an interrupt was being handled.
_ENDING = """
import signal, sys
from pier_megatron.processes import end_with_one_message
{before}
end_with_one_message()
raise {error}
"""
_ENDINGS = {
    "RuntimeError('connection closed by peer')": "sys.excepthook = lambda *_: signal.raise_signal(signal.SIGINT)",
    "KeyboardInterrupt": "sys.stdout.flush = lambda: signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize("error", _ENDINGS)
def test_an_interrupted_process_says_so_once(error: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDING.format(before=_ENDINGS[error], error=error)], capture_output=True, text=True
    )
    assert ended.returncode == INTERRUPTED
    assert ended.stderr.startswith("Pier: interrupted; what was not saved is lost")
    assert "Traceback" not in ended.stderr
