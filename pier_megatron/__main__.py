"""``torchrun ... -m pier_megatron [--device cuda|cpu] SCRIPT ARGUMENTS... --optimizer pier``."""

import sys

from pier_megatron.launcher import main

if __name__ == "__main__":
    main(sys.argv[1:])
