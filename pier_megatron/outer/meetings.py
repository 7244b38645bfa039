"""Which groups meet at an outer step, and how all of them agree where they otherwise never do."""

from collections.abc import Sequence

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Exchange, GroupExchange, Wire
from pier_megatron.exchange.pairs import DirectWire, Subgroup, draw_subgroups
from pier_megatron.outer.staging import Staging, one_ahead
from pier_megatron.outer.state import ANCHOR


def wire_of(config: PierConfig) -> Wire:
    """What sums cost in the outer steps of a run."""
    return Wire(config.codec, config.groups) if config.subgroup is None else DirectWire(config.codec, config.subgroup)


def bytes_of_outer_step(config: PierConfig, numel: int, exactly: bool = False) -> int:
    """Bytes that each rank sends to other groups for ``numel`` elements, slow weights included; see :class:`Wire`."""
    wire = wire_of(config)
    ahead = wire.bytes_of_sum(numel, exactly=True) if config.pulls else 0
    return wire.bytes_of_sum(numel, exactly) + ahead


def meeting_at(config: PierConfig, everyone: GroupExchange, iteration: int) -> Exchange:
    """The groups that this rank's group meets in the outer steps that begin after ``iteration``, itself among them."""
    if config.subgroup is None:
        return everyone
    drawn = draw_subgroups(config.groups, config.subgroup, config.subgroup_seed, iteration)
    return Subgroup(everyone, next(groups for groups in drawn if everyone.rank in groups))


def write_mean_of_anchors(stagings: Sequence[Staging], everyone: GroupExchange) -> None:
    """Writes the mean of all groups' anchors to the parameters: the same bits in all of them, whatever their anchors."""
    for staged in one_ahead(staging.lend(chunk, (ANCHOR,)) for staging in stagings for chunk in staging.state.chunks):
        staged.shared.copy_(staged.anchor)
        total = everyone.sum(staged.shared, exactly=True)
        total.advance()
        total.finish()
        staged.chunk.set_parameters(staged.shared.div_(everyone.size))
        staged.give_back()
