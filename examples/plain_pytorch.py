"""Pier in plain PyTorch: a small language model on the bytes of Python's standard library. No Megatron needed.

    torchrun --nproc-per-node 4 examples/plain_pytorch.py --groups 2

Each group is plain data parallelism; the outer loop makes one run of the groups. Gloo on a laptop, NCCL on GPUs.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pier_megatron import PierConfig
from pier_megatron.outer import OuterLoop, OuterStepReport

CONTEXT, BATCH = 64, 16


class Model(nn.Module):
    """Predicts the next byte: one layer of causal attention, one of perceptrons."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats per byte; ``text`` is int64 of shape ``[batch, CONTEXT + 1]``."""
        past, future = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        hidden = self.layer(self.bytes(past) + self.places.weight, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), future.flatten())


def main() -> None:
    """Trains; every rank of every group runs this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--sync-interval", type=int, default=10)
    parser.add_argument("--preset", default="auto")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 4 examples/plain_pytorch.py")

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % options.groups:
        parser.error(f"--groups {options.groups} does not divide the {world} ranks of this run.")

    # Neighbours form a group. Ranks that hold the same parameters, one of each group, meet in a communicator of their own.
    size = world // options.groups
    group, place = divmod(rank, size)
    inside, _ = dist.new_subgroups_by_enumeration([list(range(g * size, (g + 1) * size)) for g in range(options.groups)])
    between, _ = dist.new_subgroups_by_enumeration([list(range(p, world, size)) for p in range(size)])

    torch.manual_seed(0)  # All groups start from the same weights.
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def report(step: OuterStepReport) -> None:
        if rank == 0:
            print(step.line())

    config = PierConfig(options.iterations, options.groups, sync_interval=options.sync_interval, preset=options.preset)
    loop = OuterLoop.for_optimizer(optimizer, config, between, group=inside, report=report)

    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))))
    draw = torch.Generator().manual_seed(1 + rank)  # Every rank reads other text.
    for iteration in range(1, options.iterations + 1):
        loop.begin_iteration(iteration)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw)
        loss = model(torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(device))
        optimizer.zero_grad()
        loss.backward()
        # The lazy start averages gradients over all ranks; afterwards each group is on its own.
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=inside if loop.is_local else None)
            parameter.grad /= size if loop.is_local else world
        optimizer.step()
        loop.end_iteration()
        if iteration % 50 == 0 and place == 0:
            print(f"iteration {iteration}, group {group}: loss {loss.item():.3f} nats per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
