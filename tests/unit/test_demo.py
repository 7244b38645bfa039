"""The demo around its trainings: what it says of them, and the emulated nodes."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from pier_megatron import PierConfig, cli
from pier_megatron.commands.demo import command, comparison, corpus
from pier_megatron.commands.demo.comparison import Curve, verdict
from pier_megatron.cpu.nodes import EmulatedNodes, NoNetworkError
from pier_megatron.errors import PierConfigError

pytestmark = pytest.mark.slow


def curve(*points: tuple[float, float]) -> Curve:
    seconds, losses = zip(*points, strict=True)
    return Curve(list(range(len(points))), list(seconds), list(losses))


_SLOW = curve((10, 4.0), (20, 3.0), (30, 2.0))


def test_verdict_compares_at_the_lowest_loss_that_both_have_reached() -> None:
    sooner, tokens = verdict(_SLOW, curve((2, 4.0), (4, 3.0), (6, 2.5)))
    # Synchronous training passed 2.5 half way between 20 s and 30 s.
    assert sooner == "Pier reached a validation loss of 2.500, 4.2 x sooner: after 6 s, synchronous AdamW after 25 s"
    assert tokens == "After the same tokens: 2.500 and 2.000 nats per byte, Pier +0.500, in 6 s and 30 s"
    # It does not flatter.
    sooner, _ = verdict(_SLOW, curve((40, 4.0), (60, 2.0)))
    assert sooner == "Pier reached a validation loss of 2.000, no sooner: after 60 s, synchronous AdamW after 30 s"


def test_machine_without_tools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoNetworkError, match="ip and tc not found: install iproute2"), EmulatedNodes(2):
        pass


def test_demo_deletes_only_what_it_has_written(tmp_path: Path) -> None:
    precious = tmp_path / "pier" / "checkpoint"
    precious.mkdir(parents=True)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert cli.main(["demo", "--output", str(tmp_path), "--", "--train-iters", "9"]) == 2
    assert cli.main(["demo", "--iterations", "40", "--", "--pier-overlap", "41"]) == 2
    assert precious.exists()
    assert not (tmp_path / "corpus").exists()
    with pytest.raises(PierConfigError, match=rf"--output {tmp_path}: the demo would replace {tmp_path}/pier,"):
        command.make_empty(tmp_path / "pier")
    for _ in range(2):
        command.make_empty(tmp_path / "synchronous")
        (tmp_path / "synchronous" / "log0.txt").touch()
    (tmp_path / "pier-muon").mkdir()
    command.make_empty(tmp_path / "pier-muon")


@pytest.mark.parametrize("node", [0, 1])
def test_progress_is_shown_of_the_node_that_says_it(node: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pier_megatron.commands.demo.machine import follow

    logs = [tmp_path / "log0", tmp_path / "log1"]
    for log in logs:
        log.touch()
    logs[node].write_text(" [2026-11-22] iteration       50/     300 | consumed | lm loss: 2.9553E+00 | grad norm\n")
    process = subprocess.Popen(["sleep", "1"])
    follow([process], logs)
    shown = capsys.readouterr().out
    assert shown.startswith("     0 s  starting")
    assert re.search(r"^ +[0-9] s  iteration 50 of 300, loss 2\.955$", shown, re.MULTILINE)


def test_few_files_are_held_out_and_none_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    for name in [f"module{number}.py" for number in range(100)] + ["test/test_module.py"]:
        (library / name).write_text(f"# {name}")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(library))
    train, validation = (
        [bytes(int(token) for token in document[:-1]).decode() for document in IndexedDataset(str(prefix))]
        for prefix in corpus.write(tmp_path / "corpus")
    )
    assert 0 < len(validation) < 15
    assert sorted(train + validation) == sorted(f"# module{number}.py" for number in range(100))


def test_lines_and_record_name_preset_seed_and_final_loss(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    from pier_megatron.outer.report import SCALAR_PREFIX

    arguments = {"global_batch_size": "8", "seq_length": "128", "seed": "7", "world_size": "4"}
    pier, muon = (PierConfig(train_iters=1000, groups=2, preset=preset) for preset in ("pier-rising", "pier-muon"))
    runs = {"synchronous": None, "pier": pier, "synchronous-muon": None, "pier-muon": muon}
    for index, name in enumerate(runs):
        writer = SummaryWriter(str(tmp_path / name / "tensorboard"))
        for key, value in arguments.items():
            writer.add_text(key, value)
        for step in (0, 2, 4):
            for scalar in ("lm loss", "lm loss validation"):
                writer.add_scalar(scalar, 6.0 - index - step / 4, step, walltime=100 + step)
            # What one rank has sent, at outer steps.
            if name == "pier" and step:
                writer.add_scalar(f"{SCALAR_PREFIX}bytes-sent", 5e6, step)
        # The loss on the test dataset, by Megatron under the same name.
        writer.add_scalar("lm loss validation", 9.0, 4, walltime=110)
        writer.close()
    said = comparison.summarise(tmp_path, runs, 100)
    assert "Pier (pier-rising) reached a validation loss of 5.000, " in said
    assert re.search(r"Pier, Muon inside \(pier-muon\) reached .* synchronous Muon after ", said)
    # 20 MB of all four ranks in each synchronous iteration and at each outer step, or in each of 1000 iterations.
    assert "Crossed the groups: 2,040 MB with Pier (100 synchronous iterations, 2 outer steps), 20,000 MB without" in said
    assert re.search(r"Pier, Muon inside \(pier-muon\) reached .* synchronous AdamW after ", said)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "\n".join(result["lines"]) in said
    assert result["curves"]["pier"] == {"iterations": [0, 2, 4], "seconds": [0, 2, 4], "losses": [5.0, 4.5, 4.0]}
    assert result["labels"] == {
        "synchronous": "synchronous AdamW, seed 7: 5.000",
        "pier": "Pier (pier-rising), seed 7: 4.000",
        "synchronous-muon": "synchronous Muon, seed 7: 3.000",
        "pier-muon": "Pier, Muon inside (pier-muon), seed 7: 2.000",
    }
