"""Megatron-Bridge trains as flags do, with the same promises."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from bridge_installation import BRIDGE
from launch import REPOSITORY, Recorded, Run, execute, launch
from test_isolation import crossing
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.processes

# Lazy start to 3, outer steps at 6 and 9.
_PIER = {"groups": 2, "sync_interval": 3, "lazy_start_iters": 3}
# Between outer steps, where nothing is logged or saved; nobody looks on at the last one.
_SILENT, _MEETINGS = (4, 5, 8), (2, 6)


def with_flags(more: str = "", **pier: object) -> str:
    """The command line of a run with Pier."""
    words = [f"--pier-{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in (_PIER | pier).items()]
    return " ".join(["--train-iters 9 --global-batch-size 16 --optimizer pier", *words, more])


def with_config(more: str = "", **pier: object) -> str:
    """The same as settings of a configuration."""
    return " ".join([*(f"pier.{name}={value}" for name, value in (_PIER | pier).items()), more])


# The momentum of the flag is 0.9 by default, that of the configuration 0.95.
_MUON = (
    "optimizer.optimizer=muon optimizer.muon_momentum=0.9 optimizer.muon_fp32_matmul_prec=high "
    "optimizer.use_distributed_optimizer=False ddp.use_distributed_optimizer=False"
)

_EXPERTS = (
    "model.num_moe_experts=4 model.moe_router_topk=2 model.add_bias_linear=False model.moe_router_enable_expert_bias=True "
    "model.moe_router_score_function=sigmoid model.moe_router_load_balancing_type=none model.moe_ffn_hidden_size=128 "
    "model.moe_token_dispatcher_type=alltoall model.moe_router_dtype=None model.moe_grouped_gemm=False"
)

_SAVING = "checkpoint.save_interval=7"

# Each with flags and as settings.
_PAIRS: dict[str, tuple[str, str, dict[str, object]]] = {
    "PP 2": (
        "--pipeline-model-parallel-size 2",
        "model.pipeline_model_parallel_size=2 model.pipeline_dtype=torch.float32",
        {"overlap": 1, "fragments": 2},
    ),
    "bf16": (
        "--bf16 --overlap-grad-reduce --overlap-param-gather --ddp-average-in-collective --eval-interval 4 --eval-iters 2",
        "mixed_precision=bf16_mixed ddp.overlap_grad_reduce=True ddp.overlap_param_gather=True ddp.average_in_collective=True "
        "validation.eval_interval=4 validation.eval_iters=2",
        {"exchange_dtype": "int4", "offload": True, "preset": "diloco"},
    ),
    "pairs, TP 2": (
        "--tensor-model-parallel-size 2 --eval-interval 4 --eval-iters 2 --iterations-to-skip 5 6",
        "model.tensor_model_parallel_size=2 validation.eval_interval=4 validation.eval_iters=2 train.iterations_to_skip=[5,6]",
        {"preset": "noloco"},
    ),
    "Llama": (
        "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --group-query-attention "
        "--num-query-groups 2 --untie-embeddings-and-output-weights --init-method-std 0.3 --ffn-hidden-size 88 "
        "--exit-interval 7 --save {directory}/llama-flags --save-interval 1000000",
        "model.normalization=RMSNorm model.gated_linear_unit=True model.activation_func=torch.nn.functional.silu "
        "model.add_bias_linear=False model.position_embedding_type=rope model.num_query_groups=2 "
        "model.share_embeddings_and_output_weights=False model.init_method_std=0.3 model.ffn_hidden_size=88 "
        "train.exit_interval=7 checkpoint.save={directory}/llama-config",
        {"outer_rule": "muon"},
    ),
    "Muon": (
        "--pier-inner-optimizer muon --muon-fp32-matmul-prec high --save {directory}/muon-flags --save-interval 7",
        f"{_MUON} {_SAVING} checkpoint.save={{directory}}/muon",
        {},
    ),
    "experts": (
        "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall",
        _EXPERTS,
        {},
    ),
}
_ASKING = (
    "train.check_weight_hash_across_dp_replicas_interval=1 logger.log_params_norm=True "
    "optimizer.log_num_zeros_in_grad=True train.exit_signal_handler=True "
    "train.exit_duration_in_mins=60 rerun_state_machine.rerun_mode=validate_results logger.tensorboard_log_interval=1 "
    "logger.timing_log_level=2 logger.tensorboard_dir={directory}/tensorboard"
)
_LOADING = "checkpoint.load={directory}/checkpoints checkpoint.ckpt_step=7"
_REFUSED = {
    "groups": (
        with_config(groups=3),
        "config.optimizer.groups 3 does not divide the data-parallel size 4 .* Use one of 1, 2, 4",
    ),
    "short": (with_config(lazy_start_iters=4), "config.optimizer.lazy_start_iters 4 is no multiple of config.optimizer.sync_"),
    "another run": (
        with_config(_LOADING, groups=4),
        "config.optimizer.groups 2 is now 4.*config.optimizer.override_checkpoint",
    ),
    "sharded": (with_config("ddp.use_megatron_fsdp=True"), "config.d[a-z]*.use_megatron_fsdp cannot be used"),
    "groups of its own": (with_config("dist.use_decentralized_pg=True"), "config.dist.use_decentralized_pg cannot be used"),
    "Muon, layer-wise": (
        with_config("optimizer.optimizer=muon"),
        "config.ddp.use_distributed_optimizer=True cannot be used with config.optimizer.optimizer='muon'.*Set it to False",
    ),
    "soap": (with_config("optimizer.optimizer=soap"), "config.optimizer.optimizer='soap' cannot .* not one of adam, muon"),
    "manager": (with_config("checkpoint.custom_manager_class=a.B"), "config.checkpoint.custom_manager_class cannot be used"),
    "islands": (with_config(lighthouse="x"), "lighthouse='x' is not supported under Megatron-Bridge: elastic islands replace"),
    "removed": (with_config(outlier_zscore=3), "outlier_zscore=3: no such setting any more: groups that are not finite"),
    "misspelt": (with_config(sync_intervall=4), r"sync_intervall=4: Pier has no such setting. Did you mean sync_interval\?"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    probes = ["main", "moments", "outer"]
    trainings = [
        Run(f"{name}, {how}", line, [*probes, "census"])
        for name, (flags, settings, pier) in _PAIRS.items()
        for how, line in (("flags", with_flags(flags, **pier)), ("config", with_config(settings, **pier)))
    ]
    trainings += [
        Run(
            "stock", "stock ddp.num_distributed_optimizer_instances=2 logger.log_interval=1000 train.train_iters=6", ["census"]
        ),
        Run(
            "asking and saving",
            with_config(f"{_ASKING} {_SAVING} checkpoint.save={{directory}}/checkpoints"),
            [*probes, "census"],
        ),
        Run("resumed", with_config(_LOADING), [*probes, "outer weights"]),
        Run("Muon, resumed from one folder", with_config(f"{_MUON} checkpoint.load={{directory}}/muon/iter_0000007"), probes),
        Run("stock resumed", f"stock {_LOADING} train.exit_interval=8", ["weights"]),
        *(Run(f"refused: {name}", line, fails=True) for name, (line, _) in _REFUSED.items()),
    ]
    return launch(tmp_path_factory.mktemp("bridge"), corpus, trainings, megatron=BRIDGE, recorder="bridge_recorder")


def assert_equal(ours: Recorded, theirs: Recorded, after: int = 0) -> None:
    """Two runs are the same to the last bit, on every rank and after every iteration."""
    for rank, other in zip(ours.ranks, theirs.ranks, strict=True):
        assert rank["group"] == other["group"]
        for name in ("main", "moments", "anchor", "momentum"):
            assert {*rank[name]} == {iteration for iteration in other[name] if iteration > after}
            for iteration in rank[name]:
                assert torch.equal(flat(rank[name][iteration]), flat(other[name][iteration])), (name, iteration)


def flat(recorded: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return recorded if isinstance(recorded, torch.Tensor) else torch.cat(recorded)


@pytest.mark.parametrize("name", _PAIRS)
def test_a_configuration_trains_as_the_flags_do(runs: dict[str, Recorded], name: str) -> None:
    config, flags = runs[f"{name}, config"], runs[f"{name}, flags"]
    assert_equal(config, flags)
    assert config.losses == flags.losses
    assert config.grad_norms == flags.grad_norms
    # Megatron-LM prints iteration 1 besides, and goes on summing up from it.
    printed = [{t: loss for t, loss in run.printed_losses.items() if t > 2} for run in (config, flags)]
    assert printed[0] == printed[1]
    assert printed[0]


def outer_steps(run: Recorded) -> list[str]:
    """Log lines of outer steps, without times."""
    lines = re.findall(r"outer step after iteration.*?(?= \| elapsed)", run.printed)
    return [line for line in lines if "sent" in line]


@pytest.mark.parametrize("name", _PAIRS)
def test_outer_steps_and_the_start_are_told_alike(runs: dict[str, Recorded], name: str) -> None:
    config, flags = runs[f"{name}, config"], runs[f"{name}, flags"]
    assert outer_steps(config) == outer_steps(flags)
    assert outer_steps(config)
    blocks = [re.search(r"Pier: 2 groups of.*?outer state per rank[^\n]*", run.printed, re.DOTALL) for run in (config, flags)]
    assert blocks[0] is not None
    assert blocks[1] is not None
    # Flags are named as settings of the configuration, whose names are theirs.
    as_settings = re.sub(r"--(exit-signal[a-z-]*)", lambda flag: f"config.train.{flag[1].replace('-', '_')}", blocks[1][0])
    as_settings = re.sub(r"--pier-([a-z-]*)", lambda flag: f"config.optimizer.{flag[1].replace('-', '_')}", as_settings)
    as_settings = as_settings.replace("--save ", "config.checkpoint.save ")
    assert blocks[0][0] == as_settings


def test_evaluation_sees_the_anchor(runs: dict[str, Recorded]) -> None:
    # Megatron-Bridge shuffles validation samples as Megatron-LM does not: the weights are compared, and the loss of the test.
    for ours, theirs in zip(runs["bf16, config"].ranks, runs["bf16, flags"].ranks, strict=True):
        assert {*ours["validation"]} >= {"iteration 4", "iteration 8"}
        for iteration, evaluated in ours["validation"].items():
            assert torch.equal(evaluated, theirs["validation"][iteration])
        # In another order.
        assert torch.equal(ours["validation"]["iteration 8"].sort()[0], flat(ours["anchor"][8]).sort()[0])
        assert not torch.equal(ours["validation"]["iteration 8"], ours["main"][8])
    tested = [re.findall(r"on test set \| lm loss value: (\S+)", runs[f"bf16, {how}"].printed) for how in ("config", "flags")]
    assert tested[0] == tested[1]
    assert len(tested[0]) == 1


def test_groups_that_never_agree_are_evaluated_apart(runs: dict[str, Recorded]) -> None:
    assert runs["pairs, TP 2, config"].printed.count("each group's slow weights on its share of the samples: lm loss from") >= 2


@pytest.mark.parametrize("name", ["asking and saving", "experts, config", "Muon, config"])
def test_nothing_crosses_the_groups_between_outer_steps(runs: dict[str, Recorded], name: str) -> None:
    for iteration in _SILENT:
        assert crossing(runs[name], iteration) == []
        assert runs[name].ranks[0]["census"][iteration]
    for iteration in _MEETINGS:
        assert crossing(runs[name], iteration)


def test_stock_bridge_crosses_in_every_iteration(runs: dict[str, Recorded]) -> None:
    # The gradient and the loss; the rerun state machine is off by default.
    assert len(crossing(runs["stock"], 5)) >= 2 * len(runs["stock"].ranks)


@pytest.mark.parametrize(
    ("name", "saved"), [("resumed", "asking and saving"), ("Muon, resumed from one folder", "Muon, config")]
)
def test_a_resume_between_outer_steps_is_exact(runs: dict[str, Recorded], name: str, saved: str) -> None:
    assert " Pier resumes exactly from iteration 7" in runs[name].printed
    assert_equal(runs[name], runs[saved], after=7)


def test_stock_bridge_loads_what_the_groups_agreed_on(runs: dict[str, Recorded]) -> None:
    loaded, agreed = runs["stock resumed"].weights("initial"), runs["resumed"].weights("anchor")
    assert {*loaded} == {*agreed}
    for name, weights in loaded.items():
        if isinstance(weights, torch.Tensor):
            assert torch.equal(weights, agreed[name]), name


def test_metrics_are_in_tensorboard(runs: dict[str, Recorded]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs["asking and saving"].directory.parent / "tensorboard")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if tag.startswith("pier/")}
    assert steps["pier/pseudo-gradient-norm"] == [6, 9]


_WITHOUT_TRAINING = """
import copy, dataclasses, sys, types
from pier_megatron.cpu import bridge, emulation
emulation.install()
bridge.install()
import pier_megatron.bridge
from examples.bridge.recipes import llama_tiny
from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model, temporary_distributed_context
from pier_megatron.bridge import config
from pier_megatron.bridge.arguments import BridgeLoop
from pier_megatron.bridge.training import name_iteration
from pier_megatron.settings import PluginSettings, Settings
with temporary_distributed_context(backend="gloo"):
    model = load_megatron_model(sys.argv[1], model_type="gpt", use_cpu_init=True)
    save_megatron_model(model if isinstance(model, list) else [model], sys.argv[2])
loop = BridgeLoop(llama_tiny(), pier=True)
assert loop.in_own_words("--load /runs/exp--load/x") == "config.checkpoint.load /runs/exp--load/x"
assert loop.in_own_words("with --override-opt_param-scheduler") == "with config.scheduler.override_opt_param_scheduler"
# What has a flag is refused by the table of flags.
for part in (None, types.SimpleNamespace(enabled=False), types.SimpleNamespace(enabled=True)):
    loop.config.inprocess_restart = part
    assert bool(loop.arguments().inprocess_restart) is bool(part and part.enabled)
assert loop.in_own_words("--inprocess-restart cannot") == "config.inprocess_restart.enabled cannot"
assert copy.copy(loop.arguments()).pier_sync_interval == 5
for load, expected in {"/runs/123456": ("/runs/123456", None), "/runs/iter_0000007": ("/runs", 7)}.items():
    checkpoint = types.SimpleNamespace(load=load, ckpt_step=None)
    name_iteration(checkpoint)
    assert (checkpoint.load, checkpoint.ckpt_step) == expected

# Settings are those of the flags.
flags = {field.name: field for kind in (Settings, PluginSettings) for field in dataclasses.fields(kind)}
ours = {field.name: field for field in dataclasses.fields(config.PierOptimizerConfig) if field.name in config.settings()}
assert {*ours} | {*config._NOT_HERE} == {*flags}, {*ours} ^ {*flags}
for name in {*ours} - {"groups"}:
    assert (ours[name].type, ours[name].default) == (flags[name].type, flags[name].default), name
"""


# Many command lines in one process: it imports Megatron-Bridge for longer than they take.
_SCRIPTS = """
import json, runpy, sys
own = sys.argv[1:]
for sys.argv in json.loads(own[0]):
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.argv = own
"""


@pytest.fixture(scope="module")
def outside(runs: dict[str, Recorded], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what was made of checkpoints outside of training: Hugging Face models, logits, and a checkpoint of its own."""
    folder = tmp_path_factory.mktemp("outside")
    tokens = torch.randint(257, (4, 32), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, folder / "tokens.pt")
    LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder / "config")
    convert, look = REPOSITORY / "examples/bridge/to_hugging_face.py", Path(__file__).with_name("bridge_logits.py")
    commands = []
    for how in ("flags", "config"):
        # Between outer steps, where the groups hold different weights: the anchor is stored.
        checkpoint = runs[f"Llama, {how}"].directory.parent / f"llama-{how}" / "iter_0000007"
        commands += [
            [convert, checkpoint, folder / "config", folder / how, "--device", "cpu"],
            [look, checkpoint, folder / "tokens.pt", folder / f"{how}.pt"],
        ]
    words = [json.dumps(commands, default=str), str(checkpoint), str(folder / "saved")]
    execute([sys.executable, "-c", _SCRIPTS + _WITHOUT_TRAINING, *words], folder / "log.txt", BRIDGE)
    return folder


def test_a_llama_becomes_a_hugging_face_model(outside: Path) -> None:
    tokens = torch.load(outside / "tokens.pt")
    for how in ("flags", "config"):
        theirs = LlamaForCausalLM.from_pretrained(outside / how)(tokens).logits
        ours = torch.load(outside / f"{how}.pt")
        assert ours.abs().max() > 1
        assert (ours - theirs).abs().max() < 1e-4 * ours.abs().max()


@pytest.mark.parametrize("name", _REFUSED)
def test_refusals_name_the_setting(runs: dict[str, Recorded], name: str) -> None:
    assert re.search(_REFUSED[name][1], runs[f"refused: {name}"].error), runs[f"refused: {name}"].error
    assert "PierConfigError" in runs[f"refused: {name}"].error


_DOCTOR = """
import json, sys
from pier_megatron.cli import main
sys.path.insert(0, sys.argv[2])
for words in json.loads(sys.argv[1]):
    print(f"status {main(['doctor', *words])}")
"""


_OF_TRANSFORMER_ENGINE = """
from examples.bridge.recipes import llama_tiny

def imports():
    import transformer_engine

def graphs():
    config = llama_tiny()
    config.model.overlap_dispatch_backward_with_experts_wgrad = True
    return config
"""


def test_doctor_checks_a_recipe(tmp_path: Path) -> None:
    recipe = ["--recipe", "examples.bridge.recipes:llama_tiny"]
    (tmp_path / "engine.py").write_text(_OF_TRANSFORMER_ENGINE)
    looks = [[*recipe, "--nodes", "2", "--ranks-per-node", "2"], ["--recipe", "engine:imports"], ["--recipe", "engine:graphs"]]
    looks.append([*recipe, "--ranks-per-node", "1"])
    words = [sys.executable, "-W", "ignore", "-c", _DOCTOR, json.dumps(looks), str(tmp_path)]
    said = execute(words, tmp_path / "doctor.txt", BRIDGE)
    accepted, *unknown, refused = said.split("status 0\n")
    # Good recipes that this machine cannot build.
    assert len(unknown) == 2
    for each in unknown:
        assert "Megatron-Bridge refuses the recipe without Transformer Engine: " in each
        assert each.endswith("OK\n")
    preset = r"preset pier-orthogonal \(.+\), outer rule muon"
    assert re.search(rf"2 groups of 2 ranks, {preset}\ngroup 0: ranks 0-1 on node 0\ngroup 1: ranks 2-3 on node 1\n", accepted)
    assert re.search(r"100\.0%  0\.300  0\.800\nOK\n$", accepted)
    assert "ERROR: config.optimizer.groups 2 does not divide the data-parallel size 1" in refused
    assert refused.endswith("will not start\nstatus 1\n")


def test_outside_of_training_settings_are_those_of_the_flags_and_models_are_loaded_and_saved(outside: Path) -> None:
    assert list((outside / "saved").rglob("*.distcp"))
