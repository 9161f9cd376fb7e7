"""What adapters add to a projection, in plain torch: two batched products, whichever and however many adapters.

Owns: the arithmetic other backends are to be tested against. Never does: look at a value on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.kernels.lora.blocks import AdapterBlocks

__all__ = ["add_lora"]


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, blocks: AdapterBlocks[Tensor]) -> None:
    """`y[t] += b[i] @ (a[i] @ x[t])` for each token t with an adapter i. Changes `y`.

    y: [T, N]; x: [T, K]; a: [adapters, R, K]; b: [adapters, N, R], with the adapters' scaling in it. All in one dtype,
    in which the inner vectors are rounded, as PEFT's are.
    """
    lined_up = x.new_zeros(blocks.adapters.shape[0] * blocks.width, x.shape[1])
    lined_up[blocks.places] = x[blocks.tokens]
    inner = torch.bmm(lined_up.view(-1, blocks.width, x.shape[1]), a[blocks.adapters].transpose(1, 2))
    added = torch.bmm(inner, b[blocks.adapters].transpose(1, 2)).view(-1, y.shape[1])
    y.index_add_(0, blocks.tokens, added[blocks.places])  # no token comes twice: the sums have no order
