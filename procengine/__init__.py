"""procengine: an inference engine for language models, built as a pipeline of processes linked by ZeroMQ.

Owns: the public names. Never does: work at import; each name is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from procengine.async_client import AsyncClient
    from procengine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from procengine.client import Client
    from procengine.errors import (
        AccessDeniedError,
        ConfigError,
        EngineDeadError,
        GroupNotFoundError,
        InvalidRequestError,
        ModelError,
        OverloadedError,
        ProcengineError,
        ProtocolError,
        RequestFailedError,
        RequestLostError,
        ShuttingDownError,
        StartupError,
        UnknownAdapterError,
    )
    from procengine.llm import LLM
    from procengine.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, StreamDelta
    from procengine.sampling_params import SamplingParams
    from procengine.scores import (
        ClassificationOutput,
        HiddenStatesOutput,
        MultiVectorOutput,
        RerankResult,
        ScoreOutput,
        SparseEmbeddingOutput,
        TextScoreOutput,
        TokenClassificationOutput,
    )
    from procengine.structured.spec import StructuredOutputs

__all__ = [
    "LLM",
    "AccessDeniedError",
    "AsyncClient",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "Client",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineDeadError",
    "GroupNotFoundError",
    "HiddenStatesOutput",
    "InvalidRequestError",
    "Logprob",
    "ModelError",
    "MultiVectorOutput",
    "OverloadedError",
    "ProcengineError",
    "ProtocolError",
    "RequestFailedError",
    "RequestLostError",
    "RequestOutput",
    "RerankResult",
    "SamplingParams",
    "ScoreOutput",
    "ShuttingDownError",
    "SparseEmbeddingOutput",
    "StartupError",
    "StreamDelta",
    "StructuredOutputs",
    "TextScoreOutput",
    "TokenClassificationOutput",
    "UnknownAdapterError",
    "__version__",
]

__version__: Final = "0.1.0"  # pyproject.toml says the same; a test compares the two

_MODULE_BY_NAME: Final = {
    "LLM": "procengine.llm",
    "AsyncClient": "procengine.async_client",
    "BeamSearchOutput": "procengine.beam_search",
    "BeamSearchParams": "procengine.beam_search",
    "BeamSearchSequence": "procengine.beam_search",
    "Client": "procengine.client",
    "SamplingParams": "procengine.sampling_params",
    "CompletionOutput": "procengine.outputs",
    "EmbeddingOutput": "procengine.outputs",
    "Logprob": "procengine.outputs",
    "RequestOutput": "procengine.outputs",
    "ClassificationOutput": "procengine.scores",
    "HiddenStatesOutput": "procengine.scores",
    "MultiVectorOutput": "procengine.scores",
    "RerankResult": "procengine.scores",
    "ScoreOutput": "procengine.scores",
    "SparseEmbeddingOutput": "procengine.scores",
    "TextScoreOutput": "procengine.scores",
    "TokenClassificationOutput": "procengine.scores",
    "StreamDelta": "procengine.outputs",
    "StructuredOutputs": "procengine.structured.spec",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_BY_NAME.get(name, "procengine.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
