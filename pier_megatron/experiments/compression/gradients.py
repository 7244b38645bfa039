"""Gradients between data-parallel ranks: the reductions that Megatron would start, in a codec's bytes.

Megatron still chooses the buffers, the ranks and the times, so all of its overlap is kept. In Pier's lazy start, and with stock
instances of the distributed optimizer, the sum between instances goes the same way.
"""

import contextlib
import dataclasses
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Concatenate

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.collectives import GroupExchange, Residual, Sum
from pier_megatron.exchange.encoded import Payloads, ReduceScatter
from pier_megatron.exchange.wire import Wire
from pier_megatron.experiments.compression.buckets import BucketGroup, pieces_of
from pier_megatron.experiments.compression.layout import Piece
from pier_megatron.experiments.compression.policy import has_feedback
from pier_megatron.experiments.compression.traffic import codec_in_force, count
from pier_megatron.megatron_api import run, versions

_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"

# Scale of gradients, and over how many ranks each reduction goes.
_Domain = tuple[float, list[int]]


@dataclasses.dataclass
class _Kept:
    """What is kept from one reduction to the next.

    Attributes:
        dropped: What the codec has dropped, by group of buckets: in one domain, and by place in the order of reductions and of
            their pieces.
        newest: The reductions that began last, as long as Megatron does not wait for them.
    """

    dropped: weakref.WeakKeyDictionary[BucketGroup, tuple[_Domain, dict[tuple[int, int], Residual]]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    newest: "_Handle | None" = None

    def forget(self) -> None:
        """Goes on as a run that begins here."""
        self.dropped.clear()


def save[**P, R](save_checkpoint: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Forgets what the codec has dropped: as large as all gradients, it is not stored, and a resumed run has none of it."""
    run.part(_Kept).forget()
    return save_checkpoint(*args, **kwargs)


def start[**P](
    start_grad_sync: Callable[Concatenate[BucketGroup, P], None],
    bucket_group: BucketGroup,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Reduces gradients in a codec's bytes."""
    codec = codec_in_force("dp")
    if codec is None:
        start_grad_sync(bucket_group, *args, **kwargs)
        return
    with _listed(bucket_group) as reductions:
        start_grad_sync(bucket_group, *args, **kwargs)
    residuals = _residuals_of(bucket_group, reductions) if has_feedback(codec) else None
    if bucket_group.grad_reduce_handle is None:
        with _stream_of(bucket_group):
            # One behind the other: between instances goes what has been summed inside.
            for place, reduction in enumerate(reductions):
                _Handle(_begin(codec, bucket_group, reduction, residuals, place), before=None).wait()
    elif reductions:
        sums = [_begin(codec, bucket_group, reduction, residuals, place) for place, reduction in enumerate(reductions)]
        kept = run.part(_Kept)
        kept.newest = bucket_group.grad_reduce_handle = _Handle(itertools.chain(*sums), kept.newest)


class _Handle:
    """What Megatron waits for.

    The second half of an all-reduce begins when the next reduction has begun, which all ranks do in the same order; that of the
    last one when Megatron waits for it.
    """

    def __init__(self, sums: Iterable[Sum], before: "_Handle | None") -> None:
        self._sums, self._has_advanced = list(sums), False
        if before is not None:
            before._advance()

    def wait(self) -> None:
        self._advance()
        for one in self._sums:
            one.finish()
        kept = run.part(_Kept)
        if kept.newest is self:
            kept.newest = None

    def _advance(self) -> None:
        for one in self._sums if not self._has_advanced else ():
            one.advance()
        self._has_advanced = True


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """A reduction that Megatron would start.

    Attributes:
        output: Gradients that it leaves on this rank.
        group: Ranks that take part.
        op: Sum or mean.
        whole: Gradients to scatter over the ranks; None if ``output`` is reduced as a whole.
    """

    output: Tensor
    group: dist.ProcessGroup
    op: dist.ReduceOp.RedOpType
    whole: Tensor | None = None


@contextlib.contextmanager
def _listed(bucket_group: BucketGroup) -> Iterator[list[_Reduction]]:
    """Inside, reductions of these gradients are not started but listed."""
    reductions: list[_Reduction] = []
    storages = {bucket.grad_data.untyped_storage().data_ptr() for bucket in bucket_group.buckets}
    module = importlib.import_module(_BUFFERS)
    all_reduce = dist.all_reduce

    def reduce_scatter(
        output: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, **_: object
    ) -> None:
        reductions.append(_Reduction(output, group, op, whole))

    def sum_or_mean(
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if group is None or tensor.untyped_storage().data_ptr() not in storages:
            work: dist.Work | None = all_reduce(tensor, op, group, async_op)
            return work
        reductions.append(_Reduction(tensor, group, op))
        return None

    with (
        versions.replaced(module, {"dist_reduce_scatter_func": reduce_scatter}),
        versions.replaced(dist, {"all_reduce": sum_or_mean}),
    ):
        yield reductions


def _stream_of(bucket_group: BucketGroup) -> contextlib.AbstractContextManager[object]:
    """The stream on which Megatron reduces in two steps, inside instances and between them, if it hides that."""
    config = bucket_group.ddp_config
    is_hidden = config.overlap_grad_reduce and config.num_distributed_optimizer_instances > 1
    return torch.cuda.stream(bucket_group.communication_stream) if is_hidden else contextlib.nullcontext()


def _residuals_of(bucket_group: BucketGroup, reductions: Sequence[_Reduction]) -> dict[tuple[int, int], Residual]:
    """What the codec has dropped of these gradients, as long as their domain is the same: until Pier's lazy start ends."""
    domain = bucket_group.buckets[0].gradient_scaling_factor, [reduction.group.size() for reduction in reductions]
    dropped = run.part(_Kept).dropped
    if bucket_group not in dropped or dropped[bucket_group][0] != domain:
        dropped[bucket_group] = (domain, {})
    return dropped[bucket_group][1]


def _begin(
    codec: Codec,
    bucket_group: BucketGroup,
    reduction: _Reduction,
    residuals: dict[tuple[int, int], Residual] | None,
    place: int,
) -> list[Sum]:
    """Begins one of Megatron's reductions, in pieces."""
    output, group = reduction.output.view(1, -1), reduction.group
    ranks = group.size()
    if ranks == 1:
        return []
    whole = output if reduction.whole is None else reduction.whole.view(ranks, -1)
    laid_out = pieces_of(bucket_group, whole.view(-1), len(whole))
    divisor, wire = ranks if reduction.op == dist.ReduceOp.AVG else 1, Wire(codec, ranks)
    kind: type[_Scattered | _Summed] = _Summed if reduction.whole is None else _Scattered
    count("dp", sum(kind.nbytes(piece, wire) for piece in laid_out), kind.hops * (ranks - 1) / ranks * whole.nbytes)
    sums: list[Sum] = []
    for index, piece in enumerate(laid_out):
        if residuals is not None and (place, index) not in residuals:
            residuals[place, index] = kind.no_residual(piece, wire, output.device)
        residual = None if residuals is None else residuals[place, index]
        sums.append(kind(piece, whole, output, group, wire, divisor, residual))
    return sums


class _Scattered(Sum):
    """A reduce-scatter under way."""

    hops = 1

    @staticmethod
    def nbytes(piece: Piece, wire: Wire) -> int:
        return (wire.groups - 1) * wire.codec.nbytes(piece.numel)

    @staticmethod
    def no_residual(piece: Piece, wire: Wire, device: torch.device) -> Residual:
        return Residual(torch.zeros(wire.groups * piece.numel, device=device), torch.zeros(0, device=device))

    def __init__(
        self,
        piece: Piece,
        whole: Tensor,
        output: Tensor,
        group: dist.ProcessGroup,
        wire: Wire,
        divisor: int,
        residual: Residual | None,
    ) -> None:
        self._piece, self._output, self._divisor, self._residual = piece.of(group.rank()), output, divisor, residual
        parts = piece.read(whole)
        if residual is not None:
            parts = parts.contiguous()
        self._sum = ReduceScatter(Payloads([parts], wire.codec, [None if residual is None else residual.sent]), group)

    def finish(self) -> None:
        [total] = self._sum.result()
        self._piece.write(total.div_(self._divisor), self._output)
        _drop_what_is_not_finite(self._residual)


class _Summed(Sum):
    """An all-reduce under way."""

    hops = 2

    @staticmethod
    def nbytes(piece: Piece, wire: Wire) -> int:
        return wire.bytes_of_sum(piece.numel)

    @staticmethod
    def no_residual(piece: Piece, wire: Wire, device: torch.device) -> Residual:
        return Residual(*(torch.zeros(size, device=device) for size in (piece.numel, wire.segment_numel(piece.numel))))

    def __init__(
        self,
        piece: Piece,
        whole: Tensor,
        output: Tensor,
        group: dist.ProcessGroup,
        wire: Wire,
        divisor: int,
        residual: Residual | None,
    ) -> None:
        self._piece, self._output, self._divisor, self._residual = piece, output, divisor, residual
        self._row = piece.read(whole)
        self._sum = GroupExchange(group, wire.codec).sum([self._row[0]], [residual])

    def advance(self) -> None:
        self._sum.advance()

    def finish(self) -> None:
        self._sum.finish()
        self._piece.write(self._row.div_(self._divisor), self._output)
        _drop_what_is_not_finite(self._residual)


def _drop_what_is_not_finite(residual: Residual | None) -> None:
    """It would never leave again, also where the step that brought it is skipped or its group is restarted."""
    for dropped in (residual.sent, residual.reduced) if residual is not None else ():
        dropped.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
