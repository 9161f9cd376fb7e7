"""Any decoder that the package transformers knows: its modules, with our paged attention in the place of its own.

Owns: how attention is plugged in, what is learnt of it from a first run, and the check that the result is transformers'
own. Never does: run what it cannot run exactly; that is a ModelError when the model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.kernels.attention import AttentionSpec, Rotation
from procengine.kernels.operations import Operations
from procengine.models.decoder import AttentionCallback

__all__ = ["TransformersModel", "load_transformers"]

_numbers = count()
# What transformers hands to an attention that we take, or that says nothing about what it computes.
_KNOWN = ("scaling", "sliding_window", "softcap", "dropout", "position_ids")
_CHECKED_TOKENS = 9


def load_transformers(
    config: ModelConfig, dtype: torch.dtype, device: str | torch.device, operations: Operations
) -> TransformersModel:
    """Read `config.path` by transformers. Raises ModelError when its attention is not one that ours can stand for."""
    name = f"procengine_{next(_numbers)}"
    slot = _Slot()
    transformers.AttentionInterface.register(name, slot.attend)
    try:
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{config.path}: transformers cannot read it: {error}") from error
    if report["missing_keys"]:  # which it has filled with random numbers
        raise ModelError(f"{config.path}: tensor {min(report['missing_keys'])} is missing")
    module = module.to(device).eval()
    with torch.inference_mode():
        token_ids = torch.arange(_CHECKED_TOKENS, device=device) % config.vocab_size
        expected = module(input_ids=token_ids[None], use_cache=False).logits[0]
        module.set_attn_implementation(name)
        model = TransformersModel(config, module, slot, operations)
        model.check(token_ids, expected)
    return model


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call of an attention."""

    layer: int
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    spec: AttentionSpec
    others: dict[str, Any]


class _Slot:
    """Where a model's attention finds the callback of the pass that runs."""

    def __init__(self) -> None:
        self.callback: AttentionCallback | None = None
        self.seen: list[_Seen] | None = None

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """query, key, value: [1, heads, T, D], turned already; gives [1, T, heads, D]."""
        assert mask is None, "transformers makes no masks for an attention that it does not know"
        if self.seen is not None:
            self.seen.append(_look_at(module, query, key, value, options))
        assert self.callback is not None
        q, k, v = map(_side_by_side, (query, key, value))
        return self.callback(module.layer_idx, q, k, v, None)[None], None

    @contextmanager
    def holding(self, callback: AttentionCallback) -> Iterator[None]:
        self.callback = callback
        try:
            yield
        finally:
            self.callback = None


class _Given(nn.Module):
    """Stands for the layers of a model when its head is asked for logits of hidden states that are there already."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Output:
        assert self.hidden is not None
        return _Output(self.hidden)


class _Output:
    """As a model's layers give it; what else a head may look for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class TransformersModel:
    """As `Decoder` says."""

    quantization = "none"

    def __init__(self, config: ModelConfig, module: Any, slot: _Slot, operations: Operations) -> None:
        self.operations = operations
        self.dtype, self.device = module.dtype, module.device
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self._path, self._slot = config.path, slot
        self._layers = module.base_model
        if self._layers is module or "position_ids" not in inspect.signature(self._layers.forward).parameters:
            raise self._error("its forward pass takes no positions")
        self._head, self._given = module, _Given()
        setattr(module, module.base_model_prefix, self._given)
        self.attention = self._learn(config, module.config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback, num_layers: int | None = None
    ) -> Tensor:
        with self._slot.holding(attention):
            out = self._layers(
                input_ids=input_ids[None].long(),
                position_ids=positions[None].long(),
                use_cache=False,
                output_hidden_states=num_layers is not None,
            )
        hidden: Tensor = (out.last_hidden_state if num_layers is None else out.hidden_states[num_layers])[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        logits: Tensor = self._head(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device)).logits[0]
        self._given.hidden = None
        return logits.to(torch.float32)

    def check(self, token_ids: Tensor, expected: Tensor) -> None:
        """Two sequences side by side give the logits that transformers gives for the first alone."""
        length = token_ids.shape[0]
        lengths = torch.tensor([0, length, 2 * length - 3], dtype=torch.int32, device=self.device)
        both = torch.cat((token_ids, token_ids[3:]))
        positions = torch.cat((torch.arange(length), torch.arange(length - 3))).to(self.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
            del rotation
            spec = self.attention[layer]
            return self.operations.varlen_attention(
                q, k, v, lengths, length, spec.scale, True, spec.sliding_window, spec.softcap
            )

        found = self.compute_logits(self.forward(both, positions, attend))[:length]
        spread, tolerance = expected.float().std(), 1e-3 if self.dtype == torch.float32 else 0.1
        if float((found - expected.float()).abs().max()) > tolerance * float(spread):
            raise self._error("with paged attention it computes something else")

    def _learn(self, config: ModelConfig, facts: Any) -> tuple[AttentionSpec, ...]:
        """How each layer attends, from what its attention is given for one token."""
        seen: list[_Seen] = []
        self._slot.seen = seen
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.forward(one, one, lambda _, q, __, v, ___: v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
        self._slot.seen = None
        if [call.layer for call in seen] != list(range(config.num_layers)):
            raise self._error(
                f"its {config.num_layers} layers do not each attend once, through the attention interface"
            )
        kv_shape = (1, config.num_kv_heads, 1, config.head_dim)
        for call in seen:
            if call.k_shape != kv_shape or call.v_shape != kv_shape or call.q_shape[-1] != config.head_dim:
                raise self._error(
                    f"keys {call.k_shape[1:]} and values {call.v_shape[1:]} of layer {call.layer} are not of "
                    f"{config.num_kv_heads} heads of {config.head_dim}"
                )
            if call.others:
                raise self._error(f"its attention takes {', '.join(call.others)}")
        kinds = getattr(facts, "layer_types", None) or [None] * config.num_layers
        return tuple(self._spec(call.spec, kind, facts) for call, kind in zip(seen, kinds, strict=True))

    def _spec(self, spec: AttentionSpec, kind: str | None, facts: Any) -> AttentionSpec:
        """Some layers have their window in the mask alone, which we do not get."""
        if kind not in (None, "full_attention", "sliding_attention"):
            raise self._error(f"a layer of it is of the type {kind}")
        if kind == "sliding_attention" and spec.sliding_window is None:
            return AttentionSpec(spec.scale, facts.sliding_window, spec.softcap)
        return spec

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self._path}: this model cannot be run by transformers' modules: {reason}")


def _side_by_side(heads: Tensor) -> Tensor:
    """[T, heads, D] of [1, heads, T, D] with each token's heads one behind the other, as kernels want them and not all
    models have them. A head that is the only one gets the stride that it would have among others."""
    _, num_heads, num_tokens, head_dim = heads.shape
    return heads[0].transpose(0, 1).flatten(1).view(num_tokens, num_heads, head_dim)


def _look_at(module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> _Seen:
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    others = {name: given for name, given in options.items() if name not in _KNOWN and _matters(given)}
    if getattr(module, "is_causal", True) is False:
        others["is_causal=False"] = True
    spec = AttentionSpec(scale, options.get("sliding_window"), options.get("softcap"))
    return _Seen(module.layer_idx, tuple(query.shape), tuple(key.shape), tuple(value.shape), spec, others)


def _matters(given: Any) -> bool:
    return isinstance(given, Tensor | nn.Module | Callable)
