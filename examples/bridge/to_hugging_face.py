"""Turns a checkpoint of a Llama into a Hugging Face model with Megatron-Bridge's AutoBridge, in one process.

python examples/bridge/to_hugging_face.py runs/llama examples/bridge/llama_tiny llama-hf --device cpu
"""

import argparse
from pathlib import Path


def main() -> None:
    """Converts as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of a run's checkpoints, for the last one, or an iter_ folder: of Megatron-Bridge or Megatron-LM",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="folder with the Hugging Face config.json of the model")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder for the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where Megatron runs (default: cuda)")
    options = parser.parse_args()
    if options.device == "cpu":
        from pier_megatron.cpu import bridge, emulation

        emulation.install()
        bridge.install()
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import load_megatron_model, temporary_distributed_context
    from transformers import AutoConfig

    converter = AutoBridge.from_hf_config(AutoConfig.from_pretrained(options.config))
    folders = sorted(options.checkpoint.glob("iter_*"))
    checkpoint = str(folders[-1] if folders else options.checkpoint)
    with temporary_distributed_context(backend="gloo"):
        # AutoBridge.export_ckpt does the same for checkpoints of Megatron-Bridge; those of Megatron-LM need the type.
        model = load_megatron_model(checkpoint, model_type="gpt", use_cpu_init=True)
        converter.save_hf_pretrained(model if isinstance(model, list) else [model], options.output, show_progress=False)


if __name__ == "__main__":
    main()
