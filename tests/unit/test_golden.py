"""What ``tools/golden.py`` draws."""

import golden

from pier_megatron import PierConfig


def test_what_is_drawn_is_accepted_and_covers_every_way() -> None:
    drawn = [golden.draw(seed) for seed in range(200)]
    assert drawn[:5] == [golden.draw(seed) for seed in range(5)]
    configs = [PierConfig(groups=run["settings"]["groups"], **run["settings"]["config"]) for run in drawn]
    for is_on in ("overlap", "offload", "subgroup", "sites", "has_error_feedback"):
        assert 10 < sum(bool(getattr(config, is_on)) for config in configs) < 190, is_on
    named = {name for run in drawn for name, _ in run["commands"]}
    assert named == {"rehearse", "iterate", "stop_and_resume", "evaluate"}
