"""The processes of the test of the exchange: ``python exchange_worker.py DIRECTORY WORLD_SIZE``. No Megatron."""

import os
import sys
from pathlib import Path

import forked_ranks
import one_gpu
import torch
import torch.distributed as dist

from pier_megatron.exchange.codecs import CODECS, padded
from pier_megatron.exchange.collectives import GroupExchange, Residual
from pier_megatron.exchange.encoded import AllGather, Payloads, ReduceScatter
from pier_megatron.exchange.pairs import Subgroup
from pier_megatron.integration.census import CollectiveCensus
from pier_megatron.outer.chunks import Shards
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.staging import Staging
from pier_megatron.outer.state import RESIDUAL, OuterState
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import GOOD, NOT_FINITE, Verdicts

NUMEL = 5000
DEVICE = one_gpu.device()


def vector(rank: int, step: int = 0) -> torch.Tensor:
    """What group ``rank`` has to say: something common, something of its own, an outlier."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.sin(torch.arange(NUMEL) / 50.0)
    values = common + 0.5 * torch.randn(NUMEL, generator=generator)
    values[17 * rank] = 30.0
    return values.to(DEVICE)


def sums(codec: str, exactly: bool = False) -> dict[str, object]:
    """One sum: its value here, its counted bytes and its bytes on the wire."""
    exchange = GroupExchange(dist.group.WORLD, CODECS[codec])
    result = vector(exchange.rank)
    with CollectiveCensus() as census:
        under_way = exchange.sum([result], exactly=exactly)
        under_way.advance()
        under_way.finish()
    return {"sum": result.cpu(), "sent": exchange.wire.bytes_of_sum(NUMEL, exactly), "collectives": census.collectives}


def met(steps: int = 3) -> dict[str, object]:
    """Sums among groups 0, 1 and 3, while group 2 is on its own."""
    exchange, here = GroupExchange(dist.group.WORLD), one_gpu.device_of_pairs()
    meeting = Subgroup(exchange, (0, 1, 3) if exchange.rank != 2 else (2,))
    results = []
    with CollectiveCensus() as census:
        for step in range(steps):
            results.append(vector(exchange.rank, step).to(here))
            under_way = meeting.sum([results[-1]])
            under_way.advance()
            under_way.finish()
    gathered = meeting.gather(torch.tensor([exchange.rank], device=here)).result()
    handed = torch.full((3,), float(exchange.rank), device=here)
    if exchange.rank != 2:
        meeting.broadcast(handed, 1, [2])
    sent = sum(found.nbytes for found in census.collectives)
    return {
        "sums": [result.cpu() for result in results],
        "sent": sent,
        "counted": steps * meeting.wire.bytes_of_sum(NUMEL),
        "gathered": gathered.flatten().tolist(),
        "handed": handed.tolist(),
    }


def together(codec: str, exactly: bool) -> dict[str, list[list[torch.Tensor]]]:
    """Vectors of unequal length, summed twice with error feedback: all at once, and one after the other."""
    everyone = GroupExchange(dist.group.WORLD, CODECS[codec])
    lengths = [NUMEL - 900, 700, 200]
    found: dict[str, list[list[torch.Tensor]]] = {}
    for name, exchange in (("all", everyone), ("some", Subgroup(everyone, (0, 1, 3) if everyone.rank != 2 else (2,)))):
        for at_once in (True, False):
            residuals = [
                Residual(*(torch.zeros(size, device=DEVICE) for size in (length, exchange.wire.segment_numel(length))))
                for length in lengths
            ]
            for step in range(2):
                vectors = list(vector(everyone.rank, step).split(lengths))
                pairs = [(vectors, residuals)] if at_once else [([v], [r]) for v, r in zip(vectors, residuals, strict=True)]
                for some, dropped in pairs:
                    under_way = exchange.sum(some, dropped if not exchange.codec.lossless else (), exactly)
                    under_way.advance()
                    under_way.finish()
            of_residuals = [tensor for residual in residuals for tensor in (residual.sent, residual.reduced)]
            found.setdefault(name, []).append([tensor.cpu() for tensor in (*vectors, *of_residuals)])
    return found


def in_parts(codec: str, steps: int = 2) -> dict[str, list[torch.Tensor]]:
    """A reduce-scatter with error feedback and a gather of what it left, apart from any sum; parts are no whole blocks."""
    scattered, gathered = [], []
    size = dist.get_world_size()
    filled_up = padded(len(vector(0)) // size)
    dropped = torch.zeros(size * filled_up, device=DEVICE)
    for step in range(steps):
        parts = torch.zeros(size, filled_up, device=DEVICE)
        parts[:, : len(vector(0)) // size] = vector(dist.get_rank(), step).view(size, -1)
        scattered.append(next(ReduceScatter(Payloads([parts], CODECS[codec], [dropped]), None).result()))
        gathered.append(next(AllGather(Payloads([scattered[-1]], CODECS[codec]), None).result()))
    return {"scattered": [part.cpu() for part in scattered], "gathered": [parts.cpu() for parts in gathered]}


def drift(codec: str, feedback: bool, steps: int = 25) -> torch.Tensor:
    """Error of the running sum of many small vectors: what error feedback is for."""
    exchange = GroupExchange(dist.group.WORLD, CODECS[codec])
    residual = None
    if feedback:
        sizes = (NUMEL, exchange.wire.segment_numel(NUMEL))
        residual = Residual(*(torch.zeros(size, device=DEVICE) for size in sizes))
    total, exact = torch.zeros(NUMEL, device=DEVICE), torch.zeros(NUMEL, device=DEVICE)
    for step in range(steps):
        result = vector(exchange.rank, step)
        under_way = exchange.sum([result], [residual])
        under_way.advance()
        under_way.finish()
        total += result
        exact += sum(vector(rank, step) for rank in range(exchange.size))
    return (total - exact).abs().mean().cpu()


def rounds(codec: str, chunk_numel: int, spans_iterations: bool) -> dict[str, torch.Tensor]:
    """Two outer steps on real parameters."""
    exchange = GroupExchange(dist.group.WORLD, CODECS[codec])
    parameters = [torch.zeros(size, device=DEVICE) for size in (3000, 2000)]
    feedback = None if exchange.codec.lossless else exchange.wire.segment_numel
    residuals = () if feedback is None else (RESIDUAL,)
    state = OuterState([Shards(parameters)], chunk_numel=chunk_numel, segment_numel=feedback, residuals=residuals)
    stagings = [Staging(state)]
    for step in range(2):
        for parameter, part in zip(parameters, vector(exchange.rank, step).split([3000, 2000]), strict=True):
            parameter.sub_(part)
        verdict = NOT_FINITE if exchange.rank == 3 and step else GOOD
        rule = Nesterov(mu=0.9, eta=0.7)
        round_ = OuterRound(stagings, (0,), rule, step, verdict, Stopwatch(DEVICE), DEVICE)
        round_.meet(exchange, Verdicts(exchange, verdict, round_.lengths))
        if spans_iterations:
            round_.begin()
            for age in range(5):
                round_.proceed(age, span=5)
            round_.finish()
        else:
            round_.run()
    found = {"anchor": state.anchor, "momentum": state.momentum, "parameters": torch.cat(parameters)}
    return {name: tensor.cpu() for name, tensor in found.items()}


def main() -> None:
    one_gpu.become_rank(int(os.environ["RANK"]))
    dist.init_process_group(one_gpu.backend())
    record = {
        "sums": {codec: sums(codec) for codec in CODECS},
        "exact sums": {codec: sums(codec, exactly=True) for codec in CODECS},
        "met": met(),
        "together": {(codec, exactly): together(codec, exactly) for codec in CODECS for exactly in (False, True)},
        "in parts": {codec: in_parts(codec) for codec in CODECS},
        "drift": {(codec, on): drift(codec, on) for codec in CODECS if codec != "fp32" for on in (True, False)},
        "rounds": {
            (codec, chunk_numel, spans): rounds(codec, chunk_numel, spans)
            for codec in CODECS
            for chunk_numel in (10_000, 300)
            for spans in (False, True)
        },
    }
    torch.save(record, Path(sys.argv[1]) / f"exchange-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    forked_ranks.run(int(sys.argv[2]), main)
