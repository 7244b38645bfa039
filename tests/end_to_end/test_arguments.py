"""The command line through Megatron's own parser and validation: what it turns into, and what is refused."""

import itertools
import json
import sys
from pathlib import Path

import grids
import pytest
from launch import execute

from pier_megatron import features

pytestmark = pytest.mark.processes

_BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 --eval-interval 100 --mock-data --transformer-impl local --no-gradient-accumulation-fusion"
)
_ITERATIONS = "--train-iters 1000"
_PIER = "--optimizer pier --pier-groups 2"
_MUON = f"{_PIER} --pier-inner-optimizer muon"
_JOB = f"{_PIER} --pier-lighthouse http://h:1 --pier-island 0"
_WORLD = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
_PP2, _PP4 = (f"--num-layers 8 --pipeline-model-parallel-size {ranks} --pier-layered" for ranks in (2, 4))
_SKIP, _SKIP_8 = "--pipeline-model-parallel-size 4 --num-layers 8", "--global-batch-size 16 --pier-skip-fraction"
_V2 = "--num-virtual-stages-per-pipeline-rank 2"
# Routes of 8 micro-batches through 4 stages of one of two replicas that train apart, and of both together.
_ROUTED = f"{_SKIP} --pier-skip-routes {{folder}}/"
_ALONE, _TOGETHER = f"{_PIER} {_ROUTED}alone.json --global-batch-size 16", f"{_ROUTED}together.json --global-batch-size 16"

# What must be refused, and what the message must say: the flag, the values, the arithmetic, a remedy.
_REFUSED = {
    "--optimizer adam --pier-groups 2": ["--pier-groups", "--optimizer adam", "add --optimizer pier"],
    "--optimizer pier --pier-groups 3": ["--pier-groups 3", "8 = 2 x 3 + 2", "Use one of 1, 2, 4, 8"],
    "--optimizer pier --pier-groups 4 --context-parallel-size 4": ["2 x 4 = 8", "cut a context-parallel group"],
    f"{_PIER} --num-distributed-optimizer-instances 8": [
        "--num-distributed-optimizer-instances 8 does not divide the 4 data-parallel ranks of a group",
        "4 = 0 x 8 + 4",
    ],
    f"{_PIER} --tensor-parallel-num-weight-shards 2": [
        "--tensor-parallel-num-weight-shards 2 cannot be used with a lazy start",
        "or drop it",
    ],
    f"{_PIER} --dist-ckpt-strictness raise_all": ["a checkpoint holds more than a run asks for", "Use raise_unexpected"],
    f"{_PIER} --inprocess-restart": ["--inprocess-restart cannot be used", "let torchrun restart the job"],
    f"{_PIER} --wandb-project p --wandb-exp-name e": ["--wandb-project p: the package wandb is not", "pip install wandb"],
    f"{_PIER} --pier-islands": ["--pier-islands: no such flag any more", "Drop it"],
    f"{_JOB} --full-validation": ["--full-validation", "some have one more", "Use --eval-iters"],
    f"{_JOB} --save /nowhere --save-interval 50 --pier-save-inner-state first": ["--pier-lighthouse", "Save all"],
    f"{_PIER} --pier-lighthouse http://h:1": ["--pier-groups 2 and --pier-island None", "from 0"],
    f"{_JOB} --pier-island 2": ["--pier-island 2: must be from 0 to 1, below --pier-groups 2"],
    f"{_JOB} --pier-preset noloco": ["--pier-preset noloco in subgroups of 2", "no common state"],
    f"{_JOB} --pier-sync-seconds 60 --pier-overlap 1": ["--pier-sync-seconds 60.0 with --pier-overlap 1", "Drop it"],
    f"{_PIER} --pier-sync-seconds 60": ["--pier-sync-seconds 60.0", "--pier-lighthouse", "--pier-sync-interval alone"],
    f"{_JOB} --global-batch-size 32 --rampup-batch-size 16 16 1000": ["--rampup-batch-size", "constant --global-batch-size"],
    "--optimizer pier --pier-ranks-per-domain 3": ["--pier-ranks-per-domain 3", "8 = 2 x 3 + 2", "use one of 1, 2, 4, 8"],
    f"{_PIER} --pier-lazy-start-iters 120": ["120 = 2 x 50 + 20", "Use 100 or 150"],
    f"{_PIER} --pier-lazy-start-iters 50 --pier-lazy-start-fraction 0.2": ["not allowed with"],
    f"{_PIER} --pier-lazy-start-iters 1000": ["the run has 1000", "--optimizer adam"],
    f"{_PIER} --save /nowhere --save-interval 130 --pier-save-inner-state first": [
        "--save-interval 130",
        "130 = 2 x 50 + 30",
        "Use 100 or 150",
        "--pier-save-inner-state all",
    ],
    f"{_PIER} --pier-save-inner-state first --pier-overlap 10": ["--pier-overlap 10", "Save all"],
    f"{_PIER} --pier-outlier-zscore 3": ["--pier-outlier-zscore: no such flag any more: groups that are not"],
    f"{_PIER} --non-persistent-ckpt-type local": ["--non-persistent-ckpt-type local", "Use global"],
    f"{_PIER} --save msc://a/b --save-interval 100": ["--save msc://a/b", "Save to a folder that all share"],
    f"{_PIER} --save /nowhere --save-interval 100 --ckpt-format torch": [
        "--ckpt-format torch",
        "Use --ckpt-format torch_dist",
    ],
    f"{_PIER} --load /nowhere --ckpt-convert-format torch --ckpt-convert-save /nowhere": [
        "--ckpt-convert-format torch",
        "Convert with --optimizer adam",
    ],
    f"{_PIER} --pier-overlap 51": ["--pier-overlap 51", "from 0 to --pier-sync-interval 50"],
    f"{_PIER} --pier-fragments 51": ["--pier-fragments 51 exceeds --pier-sync-interval 50"],
    f"{_PIER} --pier-exchange-dtype int1 --pier-no-error-feedback": ["int1 with --pier-no-error-feedback", "or use int4"],
    f"{_JOB} --non-persistent-ckpt-type global --non-persistent-save-interval 50": [
        "--non-persistent-ckpt-type global cannot be used with --pier-lighthouse",
        "Use --save-interval",
    ],
    f"{_PIER} --override-ckpt-iteration 0": ["--override-ckpt-iteration 0", "--finetune"],
    f"{_PIER} --save /nowhere --save-interval 100 --pier-save-inner-state first --phase-transition-iterations 100,130": [
        "--phase-transition-iterations 130",
        "130 = 2 x 50 + 30",
        "Use 100 or 150",
    ],
    f"{_PIER} --save /nowhere --save-interval 100 --pier-save-inner-state first --step-batch-size-schedule 0:16,320:32": [
        "--step-batch-size-schedule",
        "also between outer steps",
        "Save all",
    ],
    f"{_PIER} --use-megatron-fsdp": ["--use-megatron-fsdp", "FSDP"],
    f"{_PIER} --optimizer-cpu-offload": ["--optimizer-cpu-offload", "host"],
    f"{_PIER} --bf16 --pier-inner-optimizer muon --fp8-param-gather": ["--fp8-param-gather cannot", "over AdamW", "Drop"],
    f"{_PIER} --data-parallel-random-init": ["--data-parallel-random-init", "identical weights"],
    f"{_PIER} --hybrid-context-parallel --calculate-per-token-loss": [
        "--hybrid-context-parallel cannot be used with a lazy start",
        "its own group",
    ],
    f"{_PIER} --cuda-graph-impl local --cuda-graph-scope full_iteration": ["full iteration", "Capture layers"],
    f"{_PIER} --save-wgrads-interval 10": ["--save-wgrads-interval cannot be used with a lazy start", "one instance"],
    f"{_PIER} --pier-inner-optimizer muon --qk-clip --adlr-autoresume": [
        "--qk-clip cannot be used with several groups",
        "--adlr-autoresume cannot be used with several groups in a launch: each group would ask for itself",
    ],
    # One refusal lists all mistakes.
    f"{_PIER} --use-megatron-fsdp --override-ckpt-iteration 0 --timing-log-level 1 --pier-overlap 60": [
        "--use-megatron-fsdp",
        "--override-ckpt-iteration 0",
        "--pier-overlap 60",
    ],
    f"{_PIER} --yaml-cfg config.yaml --use-torch-fsdp2": [
        "does not read --yaml-cfg",
        "--use-torch-fsdp2",
    ],
    f"{_JOB} --pier-overlap 30 --pier-fragments 2 --pier-sites 2": [
        "--pier-sites 2 cannot be used with elastic islands",
        "--pier-overlap 30 with --pier-sync-interval 50 and --pier-fragments 2 cannot be used with elastic islands",
        "50 // 2 = 25 iterations",
    ],
    f"{_PIER} --yaml-cfg config.yaml": ["--yaml-cfg", "pass the same settings as flags"],
    f"{_PIER} --num-experts 8 --expert-model-parallel-size 8": [
        "expert-data-parallel size 1",
        "8 / (ETP 1 x EP 8 x PP 1)",
    ],
    f"{_PP4} --num-virtual-stages-per-pipeline-rank 2 --use-megatron-fsdp --global-batch-size 32": [
        "--use-megatron-fsdp cannot be used with --pier-layered",
        "--pipeline-model-parallel-size 4",
        "--use-distributed-optimizer",
    ],
    "--pier-layered --use-torch-fsdp2 --no-gradient-accumulation-fusion": [
        "--use-torch-fsdp2 cannot be used with --pier-layered and --pipeline-model-parallel-size 1",
        "Drop one",
    ],
    "--pier-layered --cuda-graph-impl local": ["--cuda-graph-impl local cannot be used with --pier-layered", "Drop one"],
    "--pier-layered --recompute-granularity full --recompute-method uniform --recompute-num-layers 2": [
        "--recompute-num-layers 2: the input of every layer is kept",
        "Use --recompute-num-layers 1",
    ],
    f"{_PP4} 2 {_V2} --global-batch-size 32": [
        "--pier-layered 2 with --pipeline-model-parallel-size 4",
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
    ],
    f"{_PP2} {_V2} --no-overlap-p2p-communication --global-batch-size 32": [
        "--pipeline-model-parallel-size 2 and --no-overlap-p2p-communication",
        "Drop --no-overlap-p2p-communication",
    ],
    f"{_PP2} {_V2} --microbatch-group-size-per-virtual-pipeline-stage 4": [
        "--microbatch-group-size-per-virtual-pipeline-stage 4 contradicts --pier-layered",
        "Drop one",
    ],
    f"{_PP4} --global-batch-size 32": [
        "each of the 4 pipeline ranks",
        "Add --num-virtual-stages-per-pipeline-rank",
        "V = 2 (--num-layers 8 / --pipeline-model-parallel-size 4)",
        "rank l mod 4",
    ],
    f"{_PP4} {_V2} --global-batch-size 6": [
        "--global-batch-size 6: 6 samples / (micro-batches of 1 x 2 replicas) = 3 micro-batches",
        "--pipeline-model-parallel-size 4",
        "Use 4 x 1 x 2 = 8 samples or more",
    ],
    f"{_PP4} {_V2} --global-batch-size 8 --eval-global-batch-size 4 --optimizer adam": [
        "--eval-global-batch-size 4: 4 samples / (micro-batches of 1 x 2 replicas) = 2 micro-batches",
        "Use 4 x 1 x 2 = 8 samples or more",
    ],
    "--pier-compress smallest": ["--pier-compress: smallest", "no policy", "hybrid, aggressive, naive"],
    "--pier-compress pp=fp32 --pipeline-model-parallel-size 2": ["pp cannot be 'fp32'", "one of bf16, int12, int8, int4, off"],
    "--pier-compress hybrid,pp=bf16 --pipeline-model-parallel-size 2 --bf16": ["pp=bf16", "16 bits already", "use pp=int8"],
    "--pier-compress hybrid,tp=int8 --tensor-model-parallel-size 2 --transformer-impl transformer_engine": [
        "tp=int8 is not possible",
        "only --transformer-impl local",
    ],
    "--pier-compress hybrid --tensor-model-parallel-size 8": ["compresses nothing in this run", "data-parallel size 1"],
    "--pier-compress dp=int4 --fp16": ["--fp16 scales differently", "Use --bf16, or dp=int8"],
    "--pier-compress hybrid --use-distributed-optimizer --bf16 --ddp-reduce-scatter-with-fp32-accumulation": [
        "--ddp-reduce-scatter-with-fp32-accumulation cannot be used with --pier-compress hybrid",
        "dp=off",
    ],
    f"{_PIER} --pier-compress outer=int4 --pier-exchange-dtype int8": ["contradicts --pier-compress outer=int4", "Drop one"],
    "--global-batch-size 32 --pier-skip-fraction 0.25": [
        "--pier-skip-fraction 0.25: 1 pipeline ranks x 1 virtual stages = 1",
        "--pipeline-model-parallel-size 3 or more, or 2 with --num-virtual-stages-per-pipeline-rank",
    ],
    f"{_SKIP} {_SKIP_8} 0.5": [
        "--pier-skip-fraction 0.5 of 4 stages x 8 micro-batches (--global-batch-size 16) = 16",
        "(4 - 2) x (8 - 1) = 14 at most",
        "Use 0.438 or less, or more micro-batches or virtual stages",
    ],
    f"{_SKIP} {_SKIP_8} 0.01": ["= 0: nothing would be skipped", "Use 0.016 or more"],
    f"{_SKIP} --global-batch-size 2 --pier-skip-fraction 0.25": [
        "4 stages x 1 micro-batches (--global-batch-size 2) = 1",
        "(4 - 2) x (1 - 1) = 0 at most. Use more micro-batches or virtual stages",
    ],
    f"{_SKIP} {_V2} --global-batch-size 18 --pier-skip-fraction 0.25": [
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "9 = 2 x 4 + 1 micro-batches of a step, but 4 pipeline ranks",
    ],
    f"{_SKIP} {_SKIP_8} 0.25 --cuda-graph-impl local": [
        "--cuda-graph-impl local cannot be used with --pier-skip-fraction 0.25",
        "replay the passes of all micro-batches through all stages",
    ],
    f"{_SKIP} {_SKIP_8} 0.25 --mtp-num-layers 1 --position-embedding-type rope": [
        "--mtp-num-layers cannot be used with --pier-skip-fraction 0.25"
    ],
    f"{_SKIP} --global-batch-size 16 --pier-eval-skip 0,1,4": [
        "--pier-eval-skip 0,1,4: 0, 4 cannot be left out",
        "4 pipeline ranks x 1 virtual stages = 4 stages, from 0 to 3",
        "Use stages from 1 to 2",
    ],
    f"{_ROUTED}none.json --global-batch-size 16": ["none.json: no such file", "examples/skip_routes.py writes"],
    f"{_ROUTED}broken.json --global-batch-size 16": ["broken.json: routes: a rank keeps 4 micro-batches at once"],
    f"{_ROUTED}alone.json --global-batch-size 16": [
        "alone.json is for 1 model replicas, and a group has 2 (2 replicas / 1 groups). Plan routes for this job",
    ],
    f"{_TOGETHER.replace('16', '32')}": [
        "together.json is for steps of 8 micro-batches of a replica, and with --global-batch-size 32 there are 16",
    ],
    f"{_ROUTED}together.json --step-batch-size-schedule 0:8,320:16 --train-samples 1000": [
        "with --step-batch-size-schedule, which has 8 there are 4",
    ],
    f"{_TOGETHER.replace('model-parallel-size 4', 'model-parallel-size 8')}": [
        "together.json is for 4 stages, and --pipeline-model-parallel-size is 8. Use 4, or plan routes for this job",
    ],
    f"{_TOGETHER} --pier-skip-fraction 0.25": ["--pier-skip-fraction cannot be used with --pier-skip-routes", "Drop one"],
    f"{_TOGETHER} {_V2}": ["--num-virtual-stages-per-pipeline-rank cannot be used with --pier-skip-routes: a rank has one"],
    f"{_TOGETHER} --pier-layered {_V2}": ["--pier-layered cannot be used with --pier-skip-routes"],
    f"{_TOGETHER} --num-experts 4 --expert-model-parallel-size 2": [
        "--expert-model-parallel-size 2 cannot be used with --pier-skip-routes",
        "Use 1, or --pier-skip-fraction",
    ],
    f"{_TOGETHER} --num-experts 4 --expert-tensor-parallel-size 2": [
        "--expert-tensor-parallel-size 2 above --tensor-model-parallel-size 1 cannot be used with --pier-skip-routes",
    ],
    f"{_JOB} --pier-groups 4 {_ROUTED}alone.json --global-batch-size 64": [
        "alone.json is for 1 model replicas, and a group has 2 (8 replicas / 4 groups)",
    ],
    f"{_TOGETHER} --num-experts 4 --moe-router-load-balancing-type global_aux_loss": [
        "global_aux_loss cannot be used with --pier-skip-routes",
        "Use aux_loss or seq_aux_loss",
    ],
    f"{_PIER} --pier-preset noloco --pier-compress outer=int8": [
        "outer=int8 is not possible: groups in pairs send their weights"
    ],
    f"{_MUON} --fp16": ["--fp16 cannot be used with --pier-inner-optimizer muon", "Use --bf16"],
    f"{_MUON} --use-distributed-optimizer": [
        "--use-distributed-optimizer in FP32 cannot be used with --pier-inner-optimizer muon",
        "Add --bf16",
    ],
    f"{_MUON} --bf16 --use-distributed-optimizer --no-use-layer-wise-param-layout": [
        "--no-use-layer-wise-param-layout",
        "unequal length",
        "Drop it",
    ],
    f"{_MUON} --bf16 --use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2": [
        "--expert-model-parallel-size 2 with --use-distributed-optimizer",
        "Drop --use-distributed-optimizer",
    ],
    f"{_PIER} --optimizer pier --pier-unknown 1": ["unrecognized arguments: --pier-unknown"],
}
_ACCEPTED = {
    "turned off": (
        f"{_PIER} --ckpt-assume-constant-structure --check-weight-hash-across-dp-replicas-interval 50 "
        "--moe-router-enable-expert-bias",
        _WORLD,
    ),
    "stock": ("--optimizer adam --use-distributed-optimizer", _WORLD),
    "pier": (_PIER, _WORLD),
    "one group per node": ("--optimizer pier", _WORLD),
    "one group per Slurm node": ("--optimizer pier", {"WORLD_SIZE": "8", "SLURM_NNODES": "4"}),
    "one group per node of a Slurm step": (
        "--optimizer pier",
        {"WORLD_SIZE": "8", "SLURM_NNODES": "16", "SLURM_STEP_NUM_NODES": "4"},
    ),
    "one group per domain": ("--optimizer pier --pier-ranks-per-domain 2", _WORLD),
    "groups across domains": ("--optimizer pier --pier-ranks-per-domain 2 --pier-groups 2", {"WORLD_SIZE": "8"}),
    "flags that Pier sets anyway": (f"{_PIER} --use-distributed-optimizer", _WORLD),
    "what asks all ranks, and writes": (
        f"{_PIER} --log-energy --log-interval 20 --gpu-sniff-test-interval 20 --num-distributed-optimizer-instances 2 "
        "--fp8-format hybrid --save-params-interval 10 --save /nowhere --save-interval 50",
        _WORLD,
    ),
    "evaluation between outer steps": (f"{_PIER} --eval-interval 75", _WORLD),
    "unknown nodes": ("--optimizer pier", {"WORLD_SIZE": "8"}),
    "layered": (f"{_PP4} {_V2} --global-batch-size 8 --eval-global-batch-size 16", _WORLD),
    "layered, a ramp-up, pier": (
        f"{_PIER} {_PP4} {_V2} --step-batch-size-schedule 0:8,320:16 --eval-global-batch-size 8 --train-samples 8000",
        _WORLD,
    ),
    "layered, no evaluation": (f"{_PP4} {_V2} --global-batch-size 8 --eval-global-batch-size 4 --eval-iters 0", _WORLD),
    "compressed": (f"{_PIER} --pier-compress hybrid", _WORLD),
    "compressed, but for the outer step": (f"{_PIER} --pier-compress hybrid,outer=off", _WORLD),
    "compressed, stock": ("--optimizer adam --pier-compress naive --pipeline-model-parallel-size 2", _WORLD),
    "skipping": (f"{_SKIP} {_SKIP_8} 0.25 --pier-eval-skip 1,2", _WORLD),
    "skipping, a ramp-up, layered, pier": (
        f"{_PIER} {_PP4} {_V2} --pier-skip-fraction 0.3 --step-batch-size-schedule 0:8,320:16 --eval-global-batch-size 8 "
        "--train-samples 8000",
        _WORLD,
    ),
    "routed": (_TOGETHER, _WORLD),
    "routed, an elastic island": (f"{_JOB} --pier-groups 4 {_ROUTED}together.json --global-batch-size 64", _WORLD),
    "routed, in groups, gathering ahead": (
        f"{_ALONE} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        _WORLD,
    ),
    "muon": (_MUON, _WORLD),
    "muon, shared out": (f"{_MUON} --bf16 --use-distributed-optimizer", _WORLD),
    "samples": (f"{_PIER} --train-samples 8000 --lr-decay-samples 8000 --lr-warmup-samples 800", _WORLD),
}

# Flags of each feature inside a group, and the first words that it says.
_FEATURES = {
    "layered": (f"--pier-layered {_V2}", "Pier layered: "),
    "skipping": ("--pier-skip-fraction 0.25", "Pier skipping: "),
    "compression": ("--pier-compress hybrid", "Pier compress hybrid:"),
}
_OPTIMIZERS = (
    "--optimizer adam",
    _PIER,
    f"{_PIER} --pier-preset noloco",
    _MUON,
    f"{_JOB} --pier-no-error-feedback",
)
# All sets of them, with every way to train around them.
_CROSSINGS = {
    f"{', '.join(names) or 'none'} with {optimizer}": (names, optimizer)
    for optimizer in _OPTIMIZERS
    for count in range(len(_FEATURES) + 1)
    for names in itertools.combinations(_FEATURES, count)
}
_ACCEPTED |= {
    name: (f"{optimizer} {_SKIP} --global-batch-size 16 {' '.join(_FEATURES[one][0] for one in names)}", _WORLD)
    for name, (names, optimizer) in _CROSSINGS.items()
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    cases = {argv: (argv, _WORLD) for argv in _REFUSED} | _ACCEPTED
    folder = tmp_path_factory.mktemp("arguments")
    for name, replicas in (("alone", 1), ("together", 2)):
        (folder / f"{name}.json").write_text(grids.whole(4, replicas, 8).text())
    (folder / "broken.json").write_text((folder / "alone.json").read_text().replace('"held":4', '"held":3'))
    lines = [
        (
            f"{_BASE} {'' if '--train-samples' in argv else _ITERATIONS} {argv.replace('{folder}', str(folder))}".split(),
            environment,
        )
        for argv, environment in cases.values()
    ]
    (folder / "cases.json").write_text(json.dumps(lines))
    script = Path(__file__).with_name("parse_arguments.py")
    command = [sys.executable, str(script), str(folder / "cases.json")]
    log = execute(command, folder / "log.txt", CUDA_DEVICE_MAX_CONNECTIONS="1")
    return dict(zip(cases, json.loads(log.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("argv", _REFUSED)
def test_refused_with_its_reason(outcomes: dict[str, dict[str, object]], argv: str) -> None:
    for words in _REFUSED[argv]:
        assert words in str(outcomes[argv].get("error"))


def test_what_has_no_use_with_groups_is_turned_off(outcomes: dict[str, dict[str, object]]) -> None:
    found = outcomes["turned off"]
    assert found["ckpt_assume_constant_structure"] is False
    assert found["check_weight_hash_across_dp_replicas_interval"] is None
    warned = "\n".join(map(str, found["warned"]))
    assert "--ckpt-assume-constant-structure is turned off" in warned
    assert "--check-weight-hash-across-dp-replicas-interval 50 is turned off" in warned


def test_every_feature_is_crossed() -> None:
    assert set(_FEATURES) == {feature.__name__.split(".")[-2] for feature in features.FEATURES}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", _CROSSINGS)
def test_features_go_together_and_each_says_what_it_will_do(outcomes: dict[str, dict[str, object]], name: str) -> None:
    outcome, (names, _) = outcomes[name], _CROSSINGS[name]
    assert "error" not in outcome, outcome
    assert outcome["features"] == list(names)
    assert [one for one, (_, words) in _FEATURES.items() if words in str(outcome["said"])] == list(names)


def test_stock_run_keeps_its_arguments(outcomes: dict[str, dict[str, object]]) -> None:
    stock = outcomes["stock"]
    assert stock["optimizer"] == "adam"
    assert stock["num_distributed_optimizer_instances"] == 1
    assert not stock["pier"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("pier", 2),
        ("one group per node", 2),
        ("one group per Slurm node", 4),
        ("one group per node of a Slurm step", 4),
        ("one group per domain", 4),
        ("groups across domains", 2),
        ("flags that Pier sets anyway", 2),
    ],
)
def test_pier_becomes_adam_under_the_distributed_optimizer(
    outcomes: dict[str, dict[str, object]], name: str, groups: int
) -> None:
    outcome = outcomes[name]
    assert (outcome["optimizer"], outcome["use_distributed_optimizer"], outcome["pier"]) == ("adam", True, True)
    assert (outcome["num_distributed_optimizer_instances"], outcome["pier_groups"]) == (1, groups)


def test_what_a_world_of_its_own_confines_is_accepted(outcomes: dict[str, dict[str, object]]) -> None:
    outcome = outcomes["what asks all ranks, and writes"]
    assert "error" not in outcome, outcome
    assert outcome["num_distributed_optimizer_instances"] == 2


@pytest.mark.parametrize("name", ["muon", "muon, shared out"])
def test_pier_becomes_muon(outcomes: dict[str, dict[str, object]], name: str) -> None:
    outcome = outcomes[name]
    assert (outcome["optimizer"], outcome["use_distributed_optimizer"], outcome["pier"]) == ("muon", False, True)
    assert (outcome["num_distributed_optimizer_instances"], outcome["pier_groups"]) == (1, 2)


def test_evaluation_may_come_between_outer_steps(outcomes: dict[str, dict[str, object]]) -> None:
    assert "error" not in outcomes["evaluation between outer steps"]


def test_training_by_samples_learns_its_iterations_later(outcomes: dict[str, dict[str, object]]) -> None:
    outcome = outcomes["samples"]
    assert "error" not in outcome
    assert (outcome["optimizer"], outcome["pier"], outcome["train_iters"]) == ("adam", True, None)


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [("layered", 4), ("layered, a ramp-up, pier", 8), ("layered, no evaluation", 4), ("stock", None), ("pier", None)],
)
def test_layered_takes_all_micro_batches_at_a_time(
    outcomes: dict[str, dict[str, object]], name: str, micro_batches: int | None
) -> None:
    assert "error" not in outcomes[name]
    assert outcomes[name]["microbatch_group_size_per_vp_stage"] == micro_batches


@pytest.mark.parametrize(
    ("name", "dtype"), [("compressed", "int8"), ("compressed, but for the outer step", None), ("compressed, stock", None)]
)
def test_a_policy_includes_the_outer_step(outcomes: dict[str, dict[str, object]], name: str, dtype: str | None) -> None:
    assert "error" not in outcomes[name]
    assert outcomes[name]["pier_exchange_dtype"] == dtype


def test_routes_may_be_followed(outcomes: dict[str, dict[str, object]]) -> None:
    whole, gathering = outcomes["routed"], outcomes["routed, in groups, gathering ahead"]
    assert "0.0% of 4 stages x 16 micro-batches of 2 replicas are skipped; 96 messages" in str(whole["said"])
    assert not whole["align_param_gather"]
    assert "error" not in gathering, gathering
    assert gathering["align_param_gather"]
    assert gathering["align_grad_reduce"]
    assert "micro-batches of 2 replicas are skipped" in str(outcomes["routed, an elastic island"].get("said"))


@pytest.mark.parametrize("name", ["skipping", "skipping, a ramp-up, layered, pier"])
def test_stages_may_be_skipped(outcomes: dict[str, dict[str, object]], name: str) -> None:
    assert "error" not in outcomes[name]
    assert outcomes[name]["pier_skip_fraction"] in (0.25, 0.3)


def test_number_of_nodes_must_be_known(outcomes: dict[str, dict[str, object]]) -> None:
    assert "Give the number of groups" in str(outcomes["unknown nodes"]["error"])
