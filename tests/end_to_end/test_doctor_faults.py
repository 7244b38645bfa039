"""What keeps a job from starting, as ``pier-megatron doctor`` sees it before the job is queued: fault, line, verdict."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import MODEL, REPOSITORY, Run, launch, torchrun, user_job
from one_process import pier_megatron

from pier_megatron.cpu.preparations import LOCAL
from pier_megatron.megatron_api import versions
from pier_megatron.version import __version__

pytestmark = pytest.mark.processes

_MODEL = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 512 --train-iters 100000 --eval-interval 1000 --lr 6e-4 --bf16 "
    f"--vocab-size 50257 {LOCAL} --optimizer pier"
)
_TORCHRUN = "torchrun --nnodes 4 --nproc-per-node 4 --master-addr first"
# FOLDER is where the files of the test are.
_PLUGIN = f"{_TORCHRUN} -m pier_megatron FOLDER/pretrain.py {_MODEL}"
_JOB = f"{_PLUGIN} --mock-data"
_UNDER_SRUN = f"-m pier_megatron FOLDER/pretrain.py {_MODEL} --mock-data"
_EXPORTS = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=4"
_BUILDING = _JOB.replace("pretrain.py", "building.py")
_STOCK = f"{_TORCHRUN} FOLDER/pretrain.py {_MODEL} --mock-data".replace("--optimizer pier", "--optimizer adam")

# As in a checkout of Megatron-LM, without Transformer Engine.
_BUILDER = """
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training.arguments import core_transformer_config_from_args

def gpt_builder(args, first, last, vp_stage=None, config=None):
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(config, spec, args.padded_vocab_size, args.max_position_embeddings, first, last, vp_stage=vp_stage)
"""
_MEGATRON = versions.megatron_version().partition("+")[0]
_TROUBLES = ("WARNING", "ERROR")


# A job, and what doctor says of it: the beginnings of all warnings and errors in order, and parts of other lines.
_CASES: dict[str, tuple[str, ...]] = {
    "healthy": (
        _JOB,
        (
            f"torch {torch.__version__}, megatron-core {_MEGATRON}, transformer-engine absent, apex absent, "
            f"pier-megatron {__version__}"
        ),
    ),
    # The launch line.
    "no plugin": (_JOB.replace(" -m pier_megatron", ""), "ERROR: --optimizer pier: FOLDER/pretrain.py is started wi"),
    "no plugin, flag in a group": (
        f"{_STOCK} --pier-compress dp=int8 --use-distributed-optimizer",
        "ERROR: --pier-compress: FOLDER/pretrain.py is st",
    ),
    "script registers": (_JOB.replace("-m pier_megatron FOLDER/pretrain.py", "FOLDER/own.py"), "known by FOLDER/own.py"),
    "module registers": (_JOB.replace("-m pier_megatron FOLDER/pretrain.py", "FOLDER/indirect.py"), "known by FOLDER/own.py"),
    "patched checkout": (
        _JOB.replace("-m pier_megatron FOLDER/pretrain.py", "FOLDER/checkout/pretrain_gpt.py"),
        "known by FOLDER/checkout/megatron/training/__init__.py",
    ),
    "no script": (_JOB.replace("pretrain.py", "none.py"), "ERROR: SCRIPT FOLDER/none.py: no such file"),
    "no module": (
        _JOB.replace("-m pier_megatron FOLDER/pretrain.py", "-m no.such"),
        "ERROR: SCRIPT no.such: no",
        "ERROR: --optimizer pier: no.such is started wi",
    ),
    "torchrun's own": (_JOB.replace("--nnodes", "--nnods"), "ERROR: torchrun: error: unrecognized arguments: --nno"),
    "number of nodes": (_JOB.replace("--nnodes 4", "--nnodes many"), "ERROR: --nnodes many: give the number"),
    "python alone": (
        f"python {_UNDER_SRUN}",
        "WARNING: one model replica",
        "ERROR: python without torchrun: MASTER_ADDR, MASTER_PORT",
    ),
    "no address": (_JOB.replace("--master-addr first", ""), "WARNING: --nnodes 4 without --master-addr"),
    # What the scheduler gives.
    "srun": (f"srun -N 4 --ntasks-per-node=4 python {_UNDER_SRUN}", "ERROR: srun without torchrun: Megatron reads RANK"),
    "srun, addresses": (
        f"srun -N4 -n16 --export=ALL,MASTER_ADDR=a,MASTER_PORT=1,RANK=0 python {_UNDER_SRUN}",
        "ERROR: srun without torchrun: Megatron reads RANK, LOCAL_RANK, WORLD_SIZE, which srun",
    ),
    "srun, wrapped": (
        f"srun -N 4 -n 16 bash -c '{_EXPORTS} MASTER_ADDR=a MASTER_PORT=1; exec python {_UNDER_SRUN}'",
        "4 nodes of 4 ranks",
    ),
    "srun, a wrapper": (f"srun -N 4 -n 16 FOLDER/wrapper.sh python {_UNDER_SRUN}",),
    "srun, a program": (
        f"srun -N 4 -n 16 nice python {_UNDER_SRUN}",
        "WARNING: srun without torchrun: Megatron",
        "sure that nice",
    ),
    "srun, uneven": (f"srun -N 4 -n 6 python {_UNDER_SRUN}", "ERROR: srun --ntasks 6 on --nodes 4: 6 = 1 x 4 + 2"),
    "srun, of unknown size": (f"srun python {_UNDER_SRUN}", "ERROR: srun: the number of nodes or tasks cannot be seen"),
    "srun and torchrun": (
        f"srun -N 4 {_JOB.replace('--master-addr first', '--rdzv-backend c10d --rdzv-endpoint first:29500')}",
    ),
    "torchrun everywhere rank 0": (f"srun -N 4 {_JOB}", "ERROR: srun gives torchrun the same --node-rank on all 4"),
    "torchrun numbered": (f"srun -N 4 bash -c '{_JOB.replace('--nnodes', '--node-rank $SLURM_NODEID --nnodes')}'",),
    "too many torchruns": (
        f"srun -N 2 --ntasks-per-node 4 {_JOB}",
        "ERROR: srun starts torchrun 4 times",
        "ERROR: --nnodes 4, but srun starts torchrun on 2",
        "ERROR: srun gives",
    ),
    # Flags.
    "misspelt": (f"{_JOB} --micro-batchsize 8", "ERROR: --micro-batchsize: Megatron does not know it, and no script ad"),
    "misspelt, of Pier": (f"{_JOB} --pier-groop 2", "ERROR: --pier-groop: no such flag", "Did you mean --pier-groups?"),
    "three misspelt": (
        f"{_JOB} --tensor-model-paralel-size 4 --pier-groop 2 --pier-overlap many",
        "ERROR: --pier-groop: no such flag. Did you mean --pier-groups?",
        "ERROR: --pier-overlap: many: must be a whole number",
        "ERROR: --tensor-model-paralel-size: Megatron does not know it, and no script adds it. Did you mean --tensor",
    ),
    "three refused": (
        f"{_JOB} --use-megatron-fsdp --override-ckpt-iteration 0 --data-parallel-random-init",
        "ERROR: --use-megatron-fsdp cannot be used with --optimizer pier",
        "ERROR: --data-parallel-random-init cannot be used with --optimizer pier",
        "ERROR: --override-ckpt-iteration 0 cannot be used with --optimizer pier",
    ),
    "script's own": (f"{_JOB} --house-flag 2", "--house-flag: not Megatron's; FOLDER/pretrain.py adds it"),
    "nobody's": (
        f"{_JOB} --elsewhere 2",
        "ERROR: --elsewhere: Megatron does",
        "or of another release of Megatron, run doctor in",
    ),
    "nobody's, unless computed": (
        f"{_JOB} --elsewhere 2".replace("pretrain.py", "computing.py"),
        "WARNING: --elsewhere: Megatron does not know it, and it is not in the text of FOLDER/computing.py",
    ),
    "misspelt and missing": (
        _JOB.replace("--hidden-size", "--hiden-size"),
        "ERROR: --hiden-size: Megatron does not know it, and no script adds it. Did you mean --hidden-size?",
    ),
    "beginning of a flag": (
        f"{_JOB} --pier-sync 10",
        "ERROR: --pier-sync: no such flag. Did you mean --pier-sync-interval or --pier-sync-seconds?",
    ),
    "nothing follows from what cannot be": (
        f"{_JOB} --pier-sync-interval ten --adlr-autoresume --use-megatron-fsdp",
        "ERROR: --pier-sync-interval: ten: must be a whole number",
        "ERROR: --use-megatron-fsdp cannot be used with --optimizer pier",
    ),
    "two tables": (
        f"{_JOB} --pier-overlap 60 --pier-fragments 60 --ckpt-format torch --save FOLDER/checkpoints --save-interval 100",
        "ERROR: --pier-fragments 60 exceeds",
        "ERROR: --pier-overlap 60: must be from 0",
        "ERROR: --ckpt-format torch cannot be used",
    ),
    "hybrid": (
        _JOB.replace("--num-layers 12", "--hybrid-layer-pattern M-M*-")
        + " --pier-offload --save FOLDER/hybrid --save-interval 100",
        "--hybrid-layer-pattern: Megatron's estimate of memory, which Pier's follows, does not know hybrid models",
    ),
    "short": (
        _JOB.replace("--train-iters 100000", "--train-iters 24"),
        "WARNING: the run has no lazy start: ",
        "WARNING: the run has 1 outer step: ",
    ),
    "stray": (f"{_JOB} --lr 6e-4 7e-4", "ERROR: 7e-4: belongs to no flag"),
    "bare": (
        "torchrun --nnodes 2 FOLDER/pretrain.py --optimizer pier",
        "WARNING: --nnodes 2 without",
        "WARNING: no data is given",
        "ERROR: --optimizer pier",
        "ERROR: --micro-batch-size, --num-layers, --hidden-size, --num-attention-heads, --max-position-emb",
    ),
    "an assertion without a text": (
        f"{_JOB} --save FOLDER/new",
        "ERROR: Megatron refuses the arguments: its check 'assert args.save_interval is not None' (arguments.py, line",
        "fails: --save-interval is None. Give --save-interval.",
    ),
    # What Megatron says when it builds the model.
    "configuration": (
        f"{_BUILDING} --swiglu --quick-geglu",
        "ERROR: Megatron refuses the arguments: its check 'assert not args.swiglu'",
    ),
    "model": (
        f"{_BUILDING.replace('FOLDER/building', '--device cpu FOLDER/building')} --multi-latent-attention",
        "ERROR: Megatron cannot build the model: ",
    ),
    "model that no machine builds": (f"{_BUILDING} --multi-latent-attention", "ERROR: Megatron cannot build the model: "),
    "flag without what takes it": (
        f"{_BUILDING} --delay-wgrad-compute",
        "ERROR: Megatron refuses the arguments: Delaying wgrad compute",
    ),
    "model that may have what it needs elsewhere": (
        f"{_BUILDING.replace('--no-persist-layer-norm', '')}",
        "WARNING: here: Megatron cannot build the model: persist_layer_norm",
    ),
    "no Transformer Engine": (
        _BUILDING.replace(LOCAL, ""),
        "WARNING: here: --transformer-impl transformer_engine, the default: Transformer Engine is not installed",
        LOCAL,
    ),
    "no Transformer Engine on the CPU": (
        _BUILDING.replace(LOCAL, "--transformer-impl transformer_engine").replace(
            "FOLDER/building", "--device cpu FOLDER/building"
        ),
        "ERROR: --transformer-impl transformer_engine",
    ),
    "a package that Pier asks for": (
        f"{_JOB} --wandb-project p --wandb-exp-name e",
        "ERROR: --wandb-project p: the package wandb is not",
    ),
    # Megatron has filled in nothing that could be described.
    "a package that Megatron asks for": (
        f"{_JOB} --fp4-format e2m1",
        "WARNING: here: Megatron refuses the arguments: --fp4-format requires Transformer Engine",
    ),
    "experts on too few ranks": (
        f"{_BUILDING} --num-experts 64 --expert-model-parallel-size 64 --disable-bias-linear",
        "ERROR: --expert-model-parallel-size 64: the experts of one model replica take ETP 1 x EP 64 x PP 1 = 64 ranks, and",
        "the world size 16 is no multiple of it (16 = 0 x 64 + 16). Start 64",
    ),
    "experts on too few ranks, stock": (
        f"{_STOCK} --num-experts 64 --expert-model-parallel-size 64",
        "ERROR: --expert-model-parallel-size 64: the experts",
    ),
    "not Pier": (_STOCK, "WARNING: --optimizer adam: the job does not use Pier"),
    # Data.
    "no data": (_PLUGIN, "WARNING: no data is given"),
    "data": (f"{_PLUGIN} --data-path FOLDER/text",),
    "data, one file": (f"{_PLUGIN} --data-path FOLDER/half", "ERROR: --data-path FOLDER/half: there is no FOLDER/half.idx."),
    "data, nowhere": (f"{_PLUGIN} --data-path /none", "ERROR: --data-path /none: there is no /none.bin and no /none.idx"),
    "data, weighted": (f"{_PLUGIN} --data-path 0.3 FOLDER/text 0.7 FOLDER/x", "ERROR: --data-path FOLDER/x: there"),
    "data, two": (f"{_PLUGIN} --data-path FOLDER/x FOLDER/text", "ERROR: --data-path FOLDER/x: there"),
    "data, with the suffix": (
        f"{_PLUGIN} --data-path FOLDER/text.bin",
        "ERROR: --data-path FOLDER/text.bin: Megatron opens",
        "without the suffix",
    ),
    "data, in another form": (f"{_PLUGIN} --data-path FOLDER", "WARNING: --data-path FOLDER: there is no"),
    "data, by split": (
        f"{_PLUGIN} --train-data-path FOLDER/text --valid-data-path FOLDER/y --test-data-path FOLDER/z",
        "ERROR: --valid-data-path FOLDER/y: there",
        "ERROR: --test-data-path FOLDER/z: there",
    ),
    "data, listed": (f"{_PLUGIN} --data-args-path FOLDER/list", "ERROR: --data-args-path FOLDER/list: FOLDER/w: there"),
    "data, no list": (f"{_PLUGIN} --data-args-path FOLDER/x", "ERROR: --data-args-path FOLDER/x: cannot be read"),
    "data, listed by split": (
        f"{_PLUGIN} --per-split-data-args-path FOLDER/splits.json",
        "ERROR: --per-split-data-args-path FOLDER/splits.json, valid: FOLDER/v: there",
    ),
    "data, broken list": (f"{_PLUGIN} --per-split-data-args-path FOLDER/list", "ERROR: --per-split-data-args-path"),
    # Tokenizers.
    "tokenizer": (
        f"{_JOB} --tokenizer-model FOLDER/a.model --vocab-file v.json --merge-file m.txt",
        "ERROR: --tokenizer-model FOLDER/a",
        "ERROR: --vocab-file v.json: no such file",
        "ERROR: --merge-file m.txt",
    ),
    "tokenizer of nothing": (
        f"{_JOB} --tokenizer-type NullTokenizer".replace("--vocab-size 50257 ", ""),
        "ERROR: --vocab-size: not given; NullTokenizer needs it. Give it.",
    ),
    "tokenizer without its model": (
        f"{_JOB} --tokenizer-type HuggingFaceTokenizer",
        "ERROR: --tokenizer-model: not given; HuggingFaceTokenizer needs it. Give it.",
    ),
    "tokenizer of a hub": (f"{_JOB} --tokenizer-model openai-community/gpt2",),
    # Checkpoints.
    "saves": (
        f"{_JOB} --save FOLDER/new/folder --load FOLDER/new/folder --save-interval 1000",
        "124,475,904 parameters x 58 bytes = 7.22 GB: 2 (weights) + 12 (optimizer) + 8 (outer state) + 36 (inner state",
    ),
    "save, a file": (f"{_JOB} --save FOLDER/list/a --save-interval 9", "ERROR: --save FOLDER/list/a: FOLDER/list is no folder"),
    "TensorBoard, a file": (
        f"{_JOB} --tensorboard-dir FOLDER/list/a",
        "ERROR: --tensorboard-dir FOLDER/list/a: FOLDER/list is",
    ),
    "save, no room": (
        f"{_JOB} --save FOLDER/new --save-interval 50 --hidden-size 122880",
        "WARNING: --save FOLDER/new: a checkpoint of about",
        "or --pier-save-inner-state first",
    ),
    "load, nothing there": (f"{_JOB} --load FOLDER/new", "WARNING: --load FOLDER/new: there is no checkpoint"),
    "load, must": (f"{_JOB} --load FOLDER/new --exit-on-missing-checkpoint", "ERROR: --load FOLDER/new: there is no"),
    "load, damaged": (
        f"{_JOB} --load FOLDER/damaged",
        "ERROR: --load FOLDER/damaged/iter_0000090 is damaged: __0_0.distcp is missing. Choose another iteration with",
    ),
    "load, not named": (
        f"{_JOB} --load FOLDER/unnamed",
        "ERROR: --load FOLDER/unnamed: latest_checkpointed_iteration.txt is empty. Write one into it; whole ones there: none.",
    ),
    "pretrained": (f"{_JOB} --pretrained-checkpoint FOLDER/new", "ERROR: --pretrained-checkpoint FOLDER/new: there"),
    # All at once, also where Megatron's parser refuses the arguments.
    "many": (
        f"{_JOB.replace('-m pier_megatron FOLDER/pretrain.py', 'FOLDER/pretrain.py')} --num-layers many --vocab-file v.json",
        "ERROR: --optimizer pier",
        "ERROR: --vocab-file v.json",
        "ERROR: argument --num-layers: invalid int value: 'many'",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts and data that the jobs name."""
    folder = tmp_path_factory.mktemp("job")
    registers = "import pier_megatron\npier_megatron.register()\n"
    patch = (REPOSITORY / "patches" / "megatron-lm-0.19.patch").read_text()
    added = [line[1:] for line in patch.splitlines() if re.match(r"\+(?!\+)", line)]
    files = {
        "pretrain.py": "from megatron.training import pretrain\nparser.add_argument('--house-flag')\n",
        "computing.py": "for name in names:\n    parser.add_argument(f'--{name}')\n",
        "building.py": "from gpt_builders import gpt_builder\n",
        "gpt_builders.py": _BUILDER,
        "own.py": registers,
        "indirect.py": "import own\n",
        "checkout/pretrain_gpt.py": "from megatron.training import pretrain\n",
        "checkout/megatron/training/__init__.py": "\n".join(added),
        "wrapper.sh": f"#!/bin/sh\n{_EXPORTS.replace(' LOCAL_WORLD_SIZE=4', '')} MASTER_ADDR=a MASTER_PORT=1\nexec $*\n",
        "list": f"1 {folder}/text 2 {folder}/w",
        "splits.json": json.dumps({"train": f"{folder}/text", "valid": ["1", f"{folder}/v"], "test": None}),
        "text.bin": "",
        "text.idx": "",
        "half.bin": "",
        "unnamed/latest_checkpointed_iteration.txt": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "wrapper.sh").chmod(0o755)
    damaged = folder / "damaged" / "iter_0000090"
    dcp.save({"weight": torch.zeros(1)}, checkpoint_id=damaged, no_dist=True)
    (damaged / "__0_0.distcp").unlink()
    (folder / "damaged" / "latest_checkpointed_iteration.txt").write_text("90")
    return folder


@pytest.mark.parametrize("name", _CASES)
def test_fault_line_verdict_and_status(folder: Path, name: str) -> None:
    job, *expected = _CASES[name]
    said = pier_megatron()(f"doctor {job}".replace("FOLDER", str(folder)))
    text = said.out.replace(str(folder), "FOLDER")
    *lines, verdict = text.splitlines()
    troubles, notes = ([line for line in lines if line.startswith(_TROUBLES) == bad] for bad in (True, False))
    beginnings, parts = ([part for part in expected if part.startswith(_TROUBLES) == bad] for bad in (True, False))
    errors = [line for line in troubles if line.startswith("ERROR")]
    warnings = f"{len(troubles)} warning{'s' * (len(troubles) > 1)}" if troubles else "OK"
    assert (verdict, said.status) == (("will not start", 1) if errors else (warnings, 0)), text
    assert len(troubles) == len(beginnings), text
    assert all(map(str.startswith, troubles, beginnings)), text
    assert all(part in "\n".join((*notes, *troubles)) for part in parts), text


def test_a_checkpoint_takes_what_doctor_says(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    training = (
        "--hidden-size 256 --global-batch-size 4 --bf16 --train-iters 12 --optimizer pier --pier-groups 2 "
        "--pier-sync-interval 4 --pier-lazy-start-iters 4 --save-interval 2 --save {directory}/"
    )
    hidden = " --pier-overlap 2 --pier-exchange-dtype int8"
    runs = {name: Run(name, f"{training}{name}{flags}", saves=[6, 8, 9]) for name, flags in (("open", ""), ("hidden", hidden))}
    # Between two outer steps, where all groups differ, and after one, where group 0 has what the checkpoint's model has; with
    # an exchange under way: two buffers of each group, and what its codec has dropped. Doctor says the most.
    written = {"open": {6: 46, 8: 34}, "hidden": {9: 70}}
    launch(tmp_path, corpus, [*runs.values()], world_size=2)
    for name, run in runs.items():
        words = [*MODEL, "--mock-data", *run.argv.replace("{directory}", str(tmp_path / "new")).split()]
        said = pier_megatron()(f"doctor {shlex.join(user_job(torchrun(2), *words))}").out
        found = re.search(r"takes about ([\d,]+) parameters x (\d+) bytes = .*24 \(inner state of 2 groups apart\)", said)
        assert found, said
        assert int(found[2]) == max(written[name].values())
        for iteration, each in written[name].items():
            nbytes = sum(path.stat().st_size for path in (tmp_path / name / f"iter_{iteration:07d}").rglob("*.distcp"))
            assert nbytes == pytest.approx(each * int(found[1].replace(",", "")), rel=0.1)
