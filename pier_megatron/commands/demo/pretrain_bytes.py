"""Pretrains a GPT on bytes through Megatron's own ``pretrain()``: the smallest complete training script.

It knows nothing of Pier. It stands in for Megatron-LM's ``pretrain_gpt.py``, which is not part of the megatron-core wheel,
and runs on every release that pier_megatron supports.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import arguments, get_args, pretrain
from megatron.training.utils import get_blend_and_blend_per_split


def build_model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **groups: Any) -> GPTModel:
    """Builds this rank's part of the model; what Megatron calls a model provider."""
    args = get_args()
    config = arguments.core_transformer_config_from_args(args)
    with_transformer_engine = args.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_transformer_engine, normalization=args.normalization, vp_stage=vp_stage
    )
    groups.pop("config", None)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        **groups,
    )


def build_datasets(sizes: list[int], vp_stage: int | None = None) -> Sequence[GPTDataset | None]:
    """Builds the train, validation and test datasets of ``sizes`` samples, on every rank."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    datasets: Sequence[GPTDataset | None] = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    return datasets


# All tensor-parallel ranks read the data, which spares the broadcast from the first of them.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


# Sum of the losses, number of tokens, and both of them by the name that is logged.
_Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def forward_step(
    batches: Iterator[dict[str, torch.Tensor]], model: GPTModel
) -> tuple[torch.Tensor, Callable[[torch.Tensor], _Loss]]:
    """Runs one micro-batch; returns the per-token losses and what reduces them."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> _Loss:
    mask = mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().int()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def main() -> None:
    """Trains as the command line says."""
    leading: tuple[object, ...] = ()
    if hasattr(arguments, "parse_and_validate_args"):  # From megatron-core 0.18 on, pretrain() takes the configuration.
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        leading = (pretrain_cfg_container_from_args(arguments.parse_and_validate_args()),)
    pretrain(
        *leading,
        train_valid_test_dataset_provider=build_datasets,
        model_provider=build_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    main()
