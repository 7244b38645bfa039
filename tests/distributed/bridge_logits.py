"""Writes the logits of Megatron's own model that has loaded a checkpoint, of Megatron-Bridge or Megatron-LM.

``python bridge_logits.py CHECKPOINT TOKENS OUTPUT``: an ``iter_`` folder, and the files of two tensors.
"""

import sys

from pier_megatron.cpu import bridge, emulation

if __name__ == "__main__":
    emulation.install()
    bridge.install()

    import torch
    from megatron.bridge.training.model_load_save import load_megatron_model, temporary_distributed_context

    tokens = torch.load(sys.argv[2])
    with temporary_distributed_context(backend="gloo"), torch.no_grad():
        model = load_megatron_model(sys.argv[1], model_type="gpt", use_cpu_init=True)
        [chunk] = model if isinstance(model, list) else [model]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        torch.save(chunk.eval()(tokens, positions, None), sys.argv[3])
