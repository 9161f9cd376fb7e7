"""Triton kernels run on the CPU here, by Triton's interpreter: what is tested is what they compute, not how fast."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the kernels are imported
