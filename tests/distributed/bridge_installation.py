"""Where Megatron-Bridge is for the tests; what imports this is skipped where it is not."""

import os
import sys
from pathlib import Path

import pytest

BRIDGE = Path(os.environ.get("MEGATRON_BRIDGE_PATH", Path(sys.prefix) / "bridge"))

if not (BRIDGE / "megatron" / "bridge").is_dir():
    pytest.skip(f"Megatron-Bridge is not in {BRIDGE}: make test installs it there", allow_module_level=True)
