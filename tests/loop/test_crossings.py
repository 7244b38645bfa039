"""All options and all faults at once, in random order, against the reference and against the undisturbed run."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from programs import Program, are_the_same, check
from ranks import WORLD, Ranks, Settings

from pier_megatron.exchange.codecs import CODECS

pytestmark = pytest.mark.processes


@st.composite
def runs(draw: st.DrawFn) -> Settings:
    """Any run: sizes, lengths, and everything about the exchange."""
    in_sites = draw(st.sampled_from([False, False, False, True]))
    groups, ranks_in_group = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (1, 2)])) if not in_sites else (WORLD, 1)
    interval = draw(st.sampled_from([3, 4, 5, 2, 1]))
    lazy_start = interval * draw(st.integers(0, 2))
    config: dict[str, Any] = {
        "sync_interval": interval,
        "lazy_start_iters": lazy_start,
        "train_iters": lazy_start + draw(st.integers(5, 18)),
        "fragments": draw(st.integers(1, min(interval, 3))),
        "overlap": draw(st.integers(0, interval)),
        "exchange_dtype": draw(st.sampled_from(list(CODECS))),
        "offload": draw(st.booleans()),
        "preset": draw(st.sampled_from(["pier-rising", "diloco", "local-sgd", "noloco"])),
    }
    config["no_error_feedback"] = not CODECS[config["exchange_dtype"]].needs_error_feedback and draw(st.booleans())
    if in_sites:
        divisors = [divisor for divisor in range(1, interval + 1) if interval % divisor == 0]
        config |= {"sites": 2, "site_interval": draw(st.sampled_from(divisors)), "fragments": 1}
        config["preset"] = draw(st.sampled_from(["pier-rising", "diloco", "local-sgd"]))
    elif groups == 1:
        config["preset"] = draw(st.sampled_from(["pier-rising", "diloco"]))
    elif config["preset"] == "noloco" or draw(st.booleans()):
        config["subgroup_size"] = draw(st.integers(2, groups))
        config |= {"exchange_dtype": "fp32", "no_error_feedback": False}
        config["subgroup_seed"] = draw(st.integers(0, 3))
    if config["preset"] != "noloco" and "subgroup_size" not in config:
        config["outer_rule"] = draw(st.sampled_from([None, None, "muon"]))
    return Settings(groups, ranks_in_group, config, averages=draw(st.booleans()), copies=draw(st.booleans()))


# Iterations of peace before something happens.
_LATER = st.integers(0, 4)


class Life(RuleBasedStateMachine):
    """A run to which things happen."""

    ranks: Ranks

    @initialize(run=runs(), rehearses=st.booleans())
    def begin(self, run: Settings, rehearses: bool) -> None:
        self.program = Program(run)
        self.config = run.pier()
        self.iteration = 0
        self.last_divergence = -1000
        self.ranks.start(run)
        if rehearses:
            self.do("rehearse")
        self.layouts = self.ranks.do("layout")

    def do(self, name: str, **arguments: Any) -> list[Any]:
        self.program.commands.append((name, arguments))
        self.iteration += name == "iterate"
        return self.ranks.do(name, **arguments)

    @property
    def goes_on(self) -> bool:
        return self.iteration < self.config.train_iters

    def train(self, iterations: int) -> None:
        for _ in range(min(iterations, self.config.train_iters - self.iteration)):
            self.do("iterate")

    @precondition(lambda self: self.goes_on)
    @rule(after=_LATER)
    def skip(self, after: int) -> None:
        self.train(after)
        if self.goes_on:
            self.do("iterate", skip=True)

    @precondition(lambda self: self.goes_on)
    @rule(after=_LATER, group=st.integers(0, 3))
    def overflow(self, after: int, group: int) -> None:
        self.train(after)
        if self.goes_on:
            self.do("iterate", overflow=[group % self.config.groups])

    @property
    def may_diverge(self) -> bool:
        # Without another group nobody would be left; a subgroup in which nobody is left, twice running, ends the run.
        in_peace = self.iteration - self.last_divergence > 3 * self.config.sync_interval
        return self.config.groups > 1 and (self.config.subgroup is None or in_peace)

    @precondition(lambda self: self.goes_on and self.may_diverge)
    @rule(after=_LATER, bad=st.sets(st.integers(0, 2), min_size=1))
    def diverge(self, after: int, bad: set[int]) -> None:
        self.train(max(after, self.config.lazy_start - self.iteration))
        if self.goes_on:
            self.last_divergence = self.iteration
            # The first group stays good: without any, the run ends.
            self.do("iterate", bad=sorted({1 + group % (self.config.groups - 1) for group in bad}))

    @rule(after=_LATER)
    def stop_and_resume(self, after: int) -> None:
        self.train(after)
        self.do("stop_and_resume")

    @rule(after=_LATER, fails=st.booleans())
    def evaluate(self, after: int, fails: bool) -> None:
        self.train(after)
        seen = self.do("evaluate", fails=fails, as_mean=self.config.subgroup is not None)
        parts = self.program.settings.parts
        for part in range(parts):
            first, *others = seen[part::parts]
            assert all(torch.equal(a, b) for other in others for a, b in zip(first["seen"], other["seen"], strict=True))
        assert all(view["untouched"] and view["is_as_trained"] for view in seen)

    def teardown(self) -> None:
        if not hasattr(self, "program"):
            return
        while self.goes_on:
            self.do("iterate")
        results = self.ranks.do("result")
        check(self.program, results, self.layouts)
        if len(self.program.iterations) < len(self.program.commands):
            assert are_the_same(results, self.program.run(self.ranks, only_iterations=True))


def test_anything_goes(ranks: Ranks) -> None:
    class Here(Life):
        pass

    Here.ranks = ranks
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    how = settings(max_examples=16, stateful_step_count=6, deadline=None, database=None, suppress_health_check=health)
    run_state_machine_as_test(seed(int(os.environ["PIER_TEST_SEED"]))(Here), settings=how)
