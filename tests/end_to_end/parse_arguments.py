"""Parses and validates many command lines in one process: ``parse_arguments.py CASES`` prints a JSON list of outcomes."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from pier_megatron.cpu import emulation

emulation.install()

from megatron.training import arguments  # noqa: E402

from pier_megatron import features, register  # noqa: E402
from pier_megatron.integration import cautions  # noqa: E402
from pier_megatron.integration.arguments import config_from_args  # noqa: E402


def outcome(argv: list[str], environment: dict[str, str]) -> dict[str, object]:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES", "SLURM_STEP_NUM_NODES"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = ["pretrain.py", *argv]
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            args = arguments.parse_args()
            arguments.validate_args(args)
    except SystemExit:
        return {"error": output.getvalue().rpartition(": error: ")[2]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    names = (
        "optimizer",
        "use_distributed_optimizer",
        "num_distributed_optimizer_instances",
        "tensorboard_log_interval",
        "train_iters",
        "microbatch_group_size_per_vp_stage",
        "align_param_gather",
        "align_grad_reduce",
        "ckpt_assume_constant_structure",
        "check_weight_hash_across_dp_replicas_interval",
    )
    warned = cautions.warnings(args, config_from_args(args)) if args.pier and args.train_iters else []
    said = {
        "said": output.getvalue(),
        "warned": warned,
        "features": [feature.__name__.split(".")[-2] for feature in features.used(args)],
    }
    of_pier = {name: value for name, value in vars(args).items() if name.startswith("pier")}
    return said | of_pier | {name: getattr(args, name) for name in names}


if __name__ == "__main__":
    register()
    print(json.dumps([outcome(*case) for case in json.loads(Path(sys.argv[1]).read_text())]))
