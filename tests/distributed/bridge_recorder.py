"""Trains under Megatron-Bridge what ``recorder.py`` trains with flags, in the same processes, and looks on in the same way.

The arguments of a run say which: settings of a configuration, such as ``train.train_iters=12``, make it one of
Megatron-Bridge's. The command line also holds the flags that all runs share; the configuration takes the data from them.
"""

import ast
import contextlib
import functools
import itertools
import operator
import re
import sys
from collections.abc import Sequence
from typing import Any

from pier_megatron.cpu import bridge as bridge_on_cpu

bridge_on_cpu.install()

import recorder as flags  # noqa: E402
import torch  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training import eval as bridge_eval  # noqa: E402
from megatron.bridge.training import pretrain as bridge_pretrain  # noqa: E402
from megatron.bridge.training import train as bridge_train  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402
from megatron.bridge.training.utils import checkpoint_utils, train_utils  # noqa: E402

# With it, a configuration is that of stock Megatron-Bridge.
_STOCK = "stock"


def configuration(settings: Sequence[str], data: dict[str, str]) -> ConfigContainer:
    """The training of ``launch.MODEL``, with settings changed.

    Args:
        settings: Words such as ``optimizer.groups=2``; those of Pier's make the optimizer Pier's.
        data: Prefixes of the datasets, by flag.
    """
    from pier_megatron.bridge import with_pier

    blend = [([data[f"--{name}-data-path"]], None) for name in ("train", "valid", "test")]
    config = ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            seq_length=32,
            make_vocab_size_divisible_by=16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        train=TrainingConfig(train_iters=9, global_batch_size=16, micro_batch_size=2),
        validation=ValidationConfig(eval_interval=1000000, eval_iters=1),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=2e-3, min_lr=0.0, adam_eps=1e-4, weight_decay=0.01, use_distributed_optimizer=True
        ),
        scheduler=SchedulerConfig(lr_decay_style="constant", lr_warmup_iters=0, start_weight_decay=0.01, end_weight_decay=0.01),
        dataset=GPTDatasetConfig(
            seq_length=32,
            random_seed=1234,
            blend_per_split=blend,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=257),
        checkpoint=CheckpointConfig(save_interval=1000000),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, check_for_nan_in_grad=True),
        dist=DistributedInitConfig(),
        rng=RNGConfig(seed=1234),
    )
    bridge_on_cpu.use_cpu(config)
    pier = {}
    for path, value in (word.split("=", 1) for word in settings if word != _STOCK):
        section, _, name = path.rpartition(".")
        if section == "pier":
            pier[name] = _value(value)
        else:
            owner = getattr(config, section) if section else config
            assert hasattr(owner, name), path
            setattr(owner, name, _value(value))
    return config if _STOCK in settings else with_pier(config, **pier)


def _value(text: str) -> Any:
    if text.startswith("torch."):
        return operator.attrgetter(text.removeprefix("torch."))(torch)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def train(argv: list[str]) -> None:
    """Trains with flags or under Megatron-Bridge."""
    settings = [word for word in argv if re.match(r"(\w+\.\w+=|mixed_precision=|stock$)", word)]
    if not settings:
        flags.train_with_flags(argv)
        return
    # It hands out the very state that the run before has trained on with.
    checkpoint_utils.read_train_state.cache_clear()
    config = configuration(settings, dict(itertools.pairwise(argv)))
    with contextlib.suppress(SystemExit):
        bridge_pretrain.pretrain(config, forward_step)


def look_on() -> None:
    """Puts the recorder under the plugin's hooks, so that it sees what Megatron-Bridge sees."""
    train_step, training_log, finish = bridge_train.train_step, bridge_train.training_log, bridge_pretrain._finish_train
    # Before 0.6 there is none, and nothing to clean up.
    clean_up = getattr(bridge_pretrain, "_cleanup_after_pretrain_failure", None)
    evaluation, print_log = bridge_train.evaluate_and_print_results, train_utils.print_rank_last
    evaluate = bridge_eval.evaluate

    @functools.wraps(train_step)
    def recorded_step(
        forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, global_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        flags.recorder.begin_iteration(model, optimizer, global_state.train_state.step)
        return train_step(forward, data, model, optimizer, scheduler, global_state, *args, **kwargs)

    @functools.wraps(training_log)
    def recorded_log(losses: Any, *args: Any, **kwargs: Any) -> Any:
        record, iteration = flags.recorder.record, flags.recorder.iteration
        record["grad_norms"][iteration] = args[6]
        if losses:
            record["losses"][iteration] = float(losses["lm loss"])
        return training_log(losses, *args, **kwargs)

    @functools.wraps(evaluation)
    def recorded_evaluation(state: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        flags.recorder.evaluation = prefix
        return evaluation(state, prefix, *args, **kwargs)

    @functools.wraps(evaluate)
    def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
        flags.recorder.evaluate()
        return evaluate(*args, **kwargs)

    def look_at_the_end() -> None:
        flags.recorder.compare_copies()
        flags.recorder.collect()

    def finish_after_a_look(*args: Any) -> None:
        look_at_the_end()
        finish(*args)

    def clean_up_after_a_look(*args: Any) -> None:
        # To Megatron-Bridge the end after train.exit_interval is a failure too.
        if isinstance(sys.exception(), SystemExit):
            look_at_the_end()
        assert clean_up is not None
        clean_up(*args)

    bridge_train.train_step = recorded_step
    bridge_train.training_log = recorded_log
    train_utils.print_rank_last = flags.printing(print_log)
    bridge_train.evaluate_and_print_results = bridge_pretrain.evaluate_and_print_results = recorded_evaluation
    bridge_eval.evaluate = recorded_evaluate
    bridge_pretrain._finish_train = finish_after_a_look
    bridge_pretrain._cleanup_after_pretrain_failure = clean_up_after_a_look


def look_on_from_above() -> None:
    """Sees the end of an iteration after the plugin has done its part."""
    train_step = bridge_train.train_step

    @functools.wraps(train_step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        flags.recorder.end_iteration(result)
        return result

    bridge_train.train_step = recorded_step


def main() -> None:
    """Runs the trainings of the specification."""
    look_on()
    import pier_megatron.bridge  # noqa: F401

    look_on_from_above()
    flags.main(train)
