"""The choice of a backend."""

from __future__ import annotations

import logging

import pytest

from procengine.errors import ConfigError
from procengine.kernels import backends
from procengine.kernels.backends import OPERATIONS, Backend, resolve_backend


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_reference_runs_everywhere(op: str, name: str, device: str) -> None:
    assert resolve_backend(op, name, device) == "reference"


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="there are: auto, reference"):
        resolve_backend("attention", "cutlass", "cpu")
    with pytest.raises(ConfigError, match="unknown operation 'convolution'"):
        resolve_backend("convolution", "auto", "cpu")


@pytest.fixture
def fast_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Backend("fast", lambda device: None if device == "cuda" else "needs a GPU")
    monkeypatch.setitem(backends._BACKENDS, "norm", (fast, *backends._BACKENDS["norm"]))
    backends._resolve.cache_clear()


@pytest.mark.usefixtures("fast_norm")
def test_a_named_backend_that_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="'fast' cannot run on cpu: needs a GPU"):
        resolve_backend("norm", "fast", "cpu")
    assert resolve_backend("norm", "fast", "cuda:0") == "fast"


@pytest.mark.usefixtures("fast_norm")
def test_auto_says_once_what_it_chose_and_why_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="procengine.kernels.backends"):
        assert resolve_backend("norm", "auto", "cpu") == "reference"
        assert resolve_backend("norm", "auto", "cpu") == "reference"
        assert resolve_backend("norm", "auto", "cuda:0") == "fast"
    assert caplog.messages == ["norm on cpu: reference (not fast: needs a GPU)", "norm on cuda: fast"]
