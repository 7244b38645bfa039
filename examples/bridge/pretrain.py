"""Trains a recipe of recipes.py under Megatron-Bridge.

torchrun --nproc-per-node 2 examples/bridge/pretrain.py llama_tiny --device cpu --save runs/llama
torchrun --nnodes 8 --nproc-per-node 8 ... examples/bridge/pretrain.py llama_8b_on_8_nodes --save DIR
"""

import argparse
from pathlib import Path


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="name of a function in recipes.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to train (default: cuda)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for checkpoints, to resume from (default: none)")
    options = parser.parse_args()
    if options.device == "cpu":
        from pier_megatron.cpu import bridge, emulation

        emulation.install()
        bridge.install()
    # Only now: on the CPU, Megatron-Bridge must be imported after the stand-ins. Processes that help it save import neither.
    import recipes
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    config = getattr(recipes, options.recipe)()
    if options.save is not None:
        config.checkpoint.save = config.checkpoint.load = str(options.save.resolve())
    if options.device == "cpu":
        bridge.use_cpu(config)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
