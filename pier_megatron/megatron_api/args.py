"""What Megatron's arguments say, whatever the release."""

import argparse

# Where the supported releases keep what a CUDA graph captures.
_CUDA_GRAPH_SCOPES = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")

# Attributes whose flag is called otherwise.
_CALLED_OTHERWISE = {
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}


def uses_pier(args: argparse.Namespace) -> bool:
    """Whether this run was started with ``--optimizer pier``."""
    return bool(getattr(args, "pier", False))


def flag(name: str) -> str:
    """The flag that sets an attribute of Megatron's arguments."""
    return "--" + _CALLED_OTHERWISE.get(name, name).replace("_", "-")


def ranks_of_activations(args: argparse.Namespace) -> int:
    """Ranks over which Megatron lays what a layer hands to the next one, of a micro-batch."""
    ranks: int = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return ranks


def captures_full_iterations(args: argparse.Namespace) -> bool:
    """Whether CUDA graphs take in what a rank sends and receives."""
    return any("full_iteration" in strings(getattr(args, name, None)) for name in _CUDA_GRAPH_SCOPES)


def strings(value: object) -> list[str]:
    """The values of an argument that takes one or several, of text or of an enumeration."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(getattr(item, "name", item)) for item in values]
