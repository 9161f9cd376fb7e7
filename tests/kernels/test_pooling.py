"""Pooling: against the definition, in torch and in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from procengine.kernels.pooling import native, reference


@pytest.mark.parametrize("kind", ["pool_last", "pool_mean"])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 7], [200, 2, 31]])
def test_vectors_are_last_or_mean_states_of_length_one(kind: str, lengths: list[int]) -> None:
    hidden = torch.randn(sum(lengths), 48)
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    parts = [part.double() for part in hidden.split(lengths)]
    plain = torch.stack([part[-1] if kind == "pool_last" else part.mean(0) for part in parts])
    expected = (plain / plain.norm(dim=1, keepdim=True)).float()
    torch.testing.assert_close(getattr(reference, kind)(hidden, bounds), expected)
    torch.testing.assert_close(torch.from_numpy(getattr(native, kind)(hidden.numpy(), bounds.numpy())), expected)


def test_states_of_zeros_stay_zeros() -> None:
    bounds = np.array([0, 2], np.int32)
    for pool in (native.pool_last, native.pool_mean):
        assert not pool(np.zeros((2, 8), np.float32), bounds).any()
