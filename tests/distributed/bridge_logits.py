"""Exports a checkpoint with Megatron-Bridge's AutoBridge, and writes the logits of Megatron's own model that has loaded it.

``python bridge_logits.py CHECKPOINT CONFIG TOKENS OUTPUT``: an ``iter_`` folder, a folder with a ``config.json``, a tensor,
and a folder for the model and ``logits.pt``.
"""

import sys
from pathlib import Path

from pier_megatron.cpu import bridge, emulation

if __name__ == "__main__":
    emulation.install()
    bridge.install()

    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import load_megatron_model, temporary_distributed_context
    from transformers import AutoConfig

    checkpoint, config, output = sys.argv[1], sys.argv[2], Path(sys.argv[4])
    tokens = torch.load(sys.argv[3])
    AutoBridge.from_hf_config(AutoConfig.from_pretrained(config)).export_ckpt(checkpoint, output, show_progress=False)
    with temporary_distributed_context(backend="gloo"), torch.no_grad():
        [model] = load_megatron_model(checkpoint, skip_temp_dist_context=True)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        torch.save(model.eval()(tokens, positions, None), output / "logits.pt")
