"""Hidden states to the scores of a model's labels: the worker's part of `classify`, `score` and `reward`.

Owns: the head that a sequence classifier has behind its encoder, and softmax and sigmoid. Never does: read a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from procengine.config import HeadConfig
from procengine.encoder_runner import EncoderRunner, Options, Reduced
from procengine.errors import ConfigError
from procengine.kernels.pooling.native import pool
from procengine.label_activations import SCORES, sigmoid

if TYPE_CHECKING:
    from procengine.encoder_device import EncoderDevice
    from procengine.models.encoder_weights import EncoderHead

__all__ = ["LabelScores", "open_classify", "open_reward", "open_score"]

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)  # Abramowitz and Stegun, 7.1.26


class LabelScores:
    """[R, labels] of hidden states [T, hidden]."""

    def __init__(self, head: EncoderHead, config: HeadConfig, norm_eps: float) -> None:
        self._head = head
        self._config = config
        self._eps = norm_eps

    def __call__(self, hidden: Float32s, bounds: Int32s, options: Options) -> Reduced:
        """Scores where options[0] is set, else logits."""
        logits = self._logits(pool(hidden, bounds, self._config.pooling, normalize=False))
        return Reduced(SCORES[self._config.activation](logits) if options[0] else logits)

    def _logits(self, pooled: Float32s) -> Float32s:
        head = self._head
        x = pooled @ head.dense.T
        if head.dense_bias is not None:
            x = x + head.dense_bias
        x = _ACTIVATIONS[head.activation](x)
        if head.norm is not None:
            x = _layer_norm(x, head.norm, head.norm_bias, self._eps)
        logits: Float32s = (x @ head.classifier.T + head.classifier_bias).astype(np.float32)
        return logits


def open_classify(device: EncoderDevice) -> EncoderRunner:
    """The runner of `classify` steps."""
    return _open("classify", device)


def open_score(device: EncoderDevice) -> EncoderRunner:
    """The runner of `score` steps."""
    return _open("score", device)


def open_reward(device: EncoderDevice) -> EncoderRunner:
    """The runner of `reward` steps."""
    return _open("reward", device)


def _open(workflow: str, device: EncoderDevice) -> EncoderRunner:
    model = device.config.model
    if device.head is None or model.head is None or model.encoder is None:
        raise ConfigError(f"{workflow}: {model.name} has no labels")
    return EncoderRunner(workflow, device.model, LabelScores(device.head, model.head, model.encoder.norm_eps))


def _layer_norm(x: Float32s, weight: Float32s, bias: Float32s | None, eps: float) -> Float32s:
    centred = x - x.mean(axis=1, keepdims=True)
    normed: Float32s = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + eps) * weight
    return normed if bias is None else normed + bias


def _gelu(x: Any) -> Any:
    size = np.abs(x) * np.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * size)
    erf = 1 - t * np.polynomial.polynomial.polyval(t, _ERF) * np.exp(-np.square(size))
    return (0.5 * x * (1 + np.sign(x) * erf)).astype(np.float32)


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": np.tanh,
    "gelu": _gelu,
    "gelu_tanh": lambda x: (x * sigmoid(1.5957691216 * (x + 0.044715 * x**3))).astype(np.float32),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * sigmoid(x),
}
