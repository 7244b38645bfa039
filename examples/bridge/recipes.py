"""Recipes of Megatron-Bridge that train with Pier; pretrain.py runs them."""

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.tokenizers.config import TokenizerConfig

from pier_megatron.bridge import with_pier


def llama_tiny() -> ConfigContainer:
    """A Llama of 4 layers with RoPE, RMSNorm, SwiGLU and grouped queries, on made-up tokens: two processes, two groups."""
    config = ConfigContainer(
        model=GPTModelProvider(
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=176,
            num_attention_heads=8,
            num_query_groups=2,
            seq_length=64,
            normalization="RMSNorm",
            activation_func=torch.nn.functional.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            make_vocab_size_divisible_by=128,
        ),
        train=TrainingConfig(train_iters=40, global_batch_size=16, micro_batch_size=4),
        validation=ValidationConfig(eval_interval=20, eval_iters=2),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.01, use_distributed_optimizer=True),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=5, start_weight_decay=0.01, end_weight_decay=0.01),
        dataset=MockGPTDatasetConfig(
            seq_length=64,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=5),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=511),
        checkpoint=CheckpointConfig(save_interval=20),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dist=DistributedInitConfig(),
        rng=RNGConfig(seed=1234),
    )
    return with_pier(config, groups=2, sync_interval=5, lazy_start_iters=5)


def llama_8b_on_8_nodes() -> ConfigContainer:
    """Megatron-Bridge's own recipe of Llama 3 8B on 8 nodes of 8 GPUs: a group for each node. Not yet run on a GPU.

    It reads the model's configuration from the Hugging Face Hub, and made-up tokens until ``config.dataset.blend`` is set.
    """
    from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

    config = llama3_8b_pretrain_config()
    config.train.train_iters = 100_000
    return with_pier(config, groups=8, sync_interval=50, overlap=5)
