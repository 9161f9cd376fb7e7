"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) of many requests in one batch. `blocks` says which token
has which adapter and is free of torch; `reference` computes.

Owns: nothing but the names. Never does: arithmetic.
"""

from procengine.kernels.lora.blocks import AdapterBlocks, adapter_blocks

__all__ = ["AdapterBlocks", "adapter_blocks"]
