"""Everything that touches Megatron-LM's insides: one small module per seam, nothing copied.

Each seam names what it needs of Megatron through :mod:`pier_megatron.megatron_api.versions`, so that an unsupported release
fails at start-up with the missing symbol in the message, never in the middle of a run.
"""
