"""What holds for every feature inside a group, found by the list of them."""

import argparse
import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pier_megatron import features
from pier_megatron.errors import PierConfigError
from pier_megatron.features import FEATURES, Feature
from pier_megatron.integration import arguments, current
from pier_megatron.megatron_api.args import flag as refused_flag
from pier_megatron.settings import flag_of

_REPOSITORY = Path(__file__).parents[2]
_NAMED: dict[str, Any] = {feature.__name__.split(".")[-2]: feature for feature in FEATURES}  # type: ignore[attr-defined]


def source(feature: ModuleType) -> str:
    folder = Path(str(feature.__file__)).parent
    return "".join(path.read_text() for path in (*sorted(folder.glob("*.py")), folder.parents[1] / "features.py"))


def test_every_folder_is_in_the_list() -> None:
    folders = {path.parent.name for path in (_REPOSITORY / "pier_megatron" / "experiments").glob("*/feature.py")}
    assert set(_NAMED) == folders


@pytest.mark.parametrize("name", _NAMED)
def test_feature_has_what_the_protocol_names(name: str) -> None:
    feature = _NAMED[name]
    for part, expected in vars(Feature).items():
        if inspect.isfunction(expected) and not part.startswith("_"):
            parameters = list(inspect.signature(expected).parameters)[1:]
            assert list(inspect.signature(getattr(feature, part)).parameters) == parameters, part


@pytest.mark.parametrize("name", _NAMED)
def test_page_names_flags_and_refusals(name: str) -> None:
    """The page of a feature has each of its flags; what it says is refused stands in the code, and the other way round."""
    page, code = (_REPOSITORY / "docs" / f"{name}.md").read_text(), source(_NAMED[name])
    assert [flag_of(field.name) for field in dataclasses.fields(_NAMED[name].Settings) if flag_of(field.name) not in page] == []
    table = page.split("## What is refused")[1].split("|\n\n")[0]
    whats = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    shown = {flag for what in whats for flag in re.findall(r"`(--[\w-]+)", what)}
    refused = {refused_flag(attribute) for attribute in _NAMED[name].REFUSED}
    assert {flag for flag in shown if flag not in code and flag[2:].replace("-", "_") not in code} <= refused <= shown


def validated(**defaults: Any) -> argparse.Namespace:
    """Arguments behind the plugin's validation around one that takes a script's defaults, as Megatron's does."""
    given = argparse.Namespace(async_save=False, world_size=1, rank=0, pipeline_model_parallel_size=2, overlap_p2p_comm=False)
    given.virtual_pipeline_model_parallel_size = given.pier_skip_fraction = None

    def validate_args(args: argparse.Namespace, defaults: dict[str, Any]) -> argparse.Namespace:
        vars(args).update(defaults)
        return args

    assert arguments.validate(validate_args, given, defaults) is given
    return given


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"pier_skip_fraction": 0.25}, "2 pipeline ranks x 1 virtual stages = 2, but the first and the last"),
        ({"pier_eval_skip": "1"}, "2 pipeline ranks x 1 virtual stages = 2, but the first and the last"),
        ({"pier_layered": True}, "--pier-layered with --pipeline-model-parallel-size 2 and --no-overlap-p2p-communication"),
    ],
)
def test_what_a_script_sets_as_a_default_is_checked(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(PierConfigError, match=words):
        validated(**setting)


def test_validation_begins_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    current.set_optimizer(object())  # type: ignore[arg-type]
    assert validated(lr=0.1).lr == 0.1
    assert current.pier_optimizer() is None
    assert capsys.readouterr().out == ""


def test_changed_features_are_named_and_older_checkpoints_say_nothing() -> None:
    args = argparse.Namespace(pier_compress="hybrid", pier_skip_fraction=None, pier_layered=True)
    saved = {features.ENTRY: {"--pier-layered": True, "--pier-skip-fraction": 0.25}}
    assert features.changes(saved, args) == ["--pier-skip-fraction 0.25 is now None", "--pier-compress None is now hybrid"]
    assert features.changes({features.ENTRY: features.settings(args)}, args) == []
    assert features.changes({}, args) == []


def test_flags_beside_a_file_of_settings_are_refused() -> None:
    """Megatron drops them, and the plugin's checks are not called."""
    given = argparse.Namespace(optimizer="adam", yaml_cfg="run.yaml", pier_layered=True, pier_try_any_megatron=True)
    with pytest.raises(PierConfigError, match=r"^--pier-layered has no effect with --yaml-cfg run\.yaml"):
        arguments.translate(given)
