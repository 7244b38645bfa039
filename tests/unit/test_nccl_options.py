"""Options of the plugin's NCCL communicators, without NCCL: what is refused, and what PyTorch is handed."""

import argparse
import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange.worlds import Launch
from pier_megatron.integration import nccl_options, training

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="PyTorch without NCCL")

_MINUTE = datetime.timedelta(minutes=1)


def _args(folder: Path, text: str | None, priority: list[str] | None = None) -> argparse.Namespace:
    file = folder / "nccl.yaml"
    if text is not None:
        file.write_text(text)
    return argparse.Namespace(
        nccl_communicator_config_path=None if text is None else str(file), high_priority_stream_groups=priority
    )


def _config(**settings: Any) -> PierConfig:
    return PierConfig(**({"train_iters": 100, "groups": 4, "lazy_start_iters": 0, "sync_interval": 10} | settings))


_ON_SITES = {"sites": 2, "site_interval": 5}


def _options(args: argparse.Namespace, name: str, backend: str = "nccl") -> Any:
    with mock.patch.object(dist, "get_backend", return_value=backend):
        return nccl_options.options(args, name, _MINUTE)


def test_what_the_file_says_reaches_nccl(tmp_path: Path) -> None:
    args = _args(
        tmp_path, "pier: {max_ctas: 4, min_ctas: 4, net_name: IB, cta_policy: zero}\ntp: {max_ctas: 99}", ["pier", "tp"]
    )
    nccl_options.check(args, _config())
    found = _options(args, "pier")
    assert isinstance(found, dist.ProcessGroupNCCL.Options)
    assert (found.config.max_ctas, found.config.min_ctas, found.config.net_name) == (4, 4, "IB")
    assert found.config.cta_policy == dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    assert found.is_high_priority_stream
    # PyTorch warns of another one than that of the communicator.
    assert found._timeout == _MINUTE
    assert _options(args, "pier", "gloo") is None
    assert _options(args, "pier_inside_sites") is None


def test_without_an_entry_nothing_is_handed_on(tmp_path: Path) -> None:
    for args in (_args(tmp_path, None), _args(tmp_path, "tp: {max_ctas: 4}", ["tp"]), argparse.Namespace()):
        nccl_options.check(args, _config())
        assert _options(args, "pier") is None
    # Priority needs no file.
    args = _args(tmp_path, None, ["pier_inside_sites"])
    nccl_options.check(args, _config(**_ON_SITES))
    assert _options(args, "pier_inside_sites").is_high_priority_stream


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pier: {max_ctas: many}", r"pier: max_ctas is 'many'. Use a whole number from 1 to 64"),
        ("pier: {max_ctas: 65}", r"pier: max_ctas is 65. Use a whole number from 1 to 64"),
        ("pier: {min_ctas: 8, max_ctas: 4}", r"min_ctas 8 is above max_ctas 4. Lower min_ctas"),
        ("pier: {max_cta: 4}", r"option 'max_cta', which Megatron passes over. Use is_high_priority_stream, cga"),
        ("pier: {is_high_priority_stream: 1}", r"is_high_priority_stream is 1. Use true or false"),
        ("pier: {cta_policy: none}", r"cta_policy is 'none'. Use default, efficiency, zero"),
        ("pier_sites: {max_ctas: 4}", r"no communicator 'pier_sites'. Use pier or pier_inside_sites"),
        ("pier_inside_sites: {max_ctas: 4}", r"'pier_inside_sites' has no effect without --pier-sites"),
        ("- pier", r"holds no names of communicators"),
        ("pier: {max_ctas", r"cannot be read: .*Name a YAML file"),
    ],
)
def test_bad_values_are_refused_with_the_flag(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PierConfigError, match=rf"(?s)--nccl-communicator-config-path \S+nccl\.yaml.*{said}"):
        nccl_options.check(_args(tmp_path, text), _config())


def test_every_communicator_has_its_options_and_a_name_for_the_flight_recorder() -> None:
    made: dict[str, tuple[list[int], object]] = {}

    def note(_: Launch, key: str, name: str, ranks: list[int], timeout: object, options: object = None) -> object:
        made[name] = ranks, options
        return mock.Mock()

    # Rank 1 of group 2 of four, on its way through what training.with_outer_loop connects.
    launch, args = Launch(5, 8, 4, store=object()), mock.Mock()
    with mock.patch.object(Launch, "_communicator", note), mock.patch.object(nccl_options, "options", lambda _, name, __: name):
        launch.connect("BETWEEN_GROUPS", _MINUTE, "groups")
        training.site_communicators(launch, _config(groups=4, sites=2, site_interval=1, sync_interval=2), args, _MINUTE)
    assert made == {
        "BETWEEN_GROUPS": ([1, 3, 5, 7], "groups"),
        "INSIDE_SITES": ([5, 7], nccl_options.INSIDE_SITES),
        "BETWEEN_SITES": ([1, 5], nccl_options.BETWEEN_GROUPS),
    }


def test_what_islands_and_pytorch_lack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = _config(lighthouse="http://host:1", preset="diloco")
    with pytest.raises(PierConfigError, match=r"--high-priority-stream-groups pier: .*no effect with --pier-lighthouse"):
        nccl_options.check(_args(tmp_path, None, ["pier"]), elastic)
    monkeypatch.delattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO")
    with pytest.raises(PierConfigError, match=r"cta_policy is 'zero', which PyTorch 2.* does not offer. Drop it"):
        nccl_options.check(_args(tmp_path, "pier: {cta_policy: zero}"), _config())
