"""Workflows: what a task is made of. A workflow names its parts; each process imports only the parts it runs.

Owns: the registry. Never does: import a part before somebody asks for it.
To add a task, write its parts and add a line to `WORKFLOWS`, or, in a package of your own, an entry point of the group
"procengine.workflows" (docs/WORKFLOWS.md); a model says in `ModelConfig.workflows` what it supports.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

__all__ = ["ENTRY_POINTS", "WORKFLOWS", "Workflow", "find_workflow", "installed_workflows", "load_part"]

ENTRY_POINTS: Final = "procengine.workflows"


@dataclass(frozen=True, slots=True)
class Workflow:
    """One task, as "module:attribute" paths.

    Attributes:
        body: the msgspec Struct a client sends in `Submit.body`; it validates itself as far as it can alone.
        accept: `(body, prompt_token_ids, facts, identity) -> request`, validation against the model and the limits.
        register: `(request, body) -> Register`, what the output process must know of it.
        planner: plans steps and takes in results (frontend), see `procengine.pipeline.Planner`.
        forward: `(device) -> runner`, runs steps of a decoder (worker), see `procengine.device`; "": there is none.
        encode: the same of a bidirectional encoder, see `procengine.encoder_device`.
        postprocess: `(tokenizer) -> Postprocessor`, turns results into client messages (output).
    """

    name: str
    body: str
    accept: str
    register: str
    planner: str
    forward: str
    postprocess: str
    encode: str = ""


WORKFLOWS: Final = {
    "generate": Workflow(
        name="generate",
        body="procengine.workflows.generate:GenerateBody",
        accept="procengine.workflows.generate:accept",
        register="procengine.workflows.generate:register",
        planner="procengine.workflows.generate:GeneratePlanner",
        forward="procengine.runner:open_runner",
        postprocess="procengine.text_outputs:TextOutputs",
    ),
    "embed": Workflow(
        name="embed",
        body="procengine.workflows.embed:EmbedBody",
        accept="procengine.workflows.embed:accept",
        register="procengine.workflows.embed:register",
        planner="procengine.workflows.embed:EmbedPlanner",
        forward="procengine.prefill_runner:open_embed",
        postprocess="procengine.embed_outputs:EmbedOutputs",
        encode="procengine.encoder_runner:open_embed",
    ),
    "embed_sparse": Workflow(
        name="embed_sparse",
        body="procengine.workflows.embed_tokens:EmbedTokensBody",
        accept="procengine.workflows.embed_tokens:accept",
        register="procengine.workflows.embed_tokens:register_sparse",
        planner="procengine.workflows.embed_tokens:EmbedSparsePlanner",
        forward="",
        postprocess="procengine.lexical_outputs:LexicalOutputs",
        encode="procengine.token_heads:open_embed_sparse",
    ),
    "embed_multi": Workflow(
        name="embed_multi",
        body="procengine.workflows.embed_tokens:EmbedTokensBody",
        accept="procengine.workflows.embed_tokens:accept",
        register="procengine.workflows.embed_tokens:register_multi",
        planner="procengine.workflows.embed_tokens:EmbedMultiPlanner",
        forward="",
        postprocess="procengine.embed_outputs:EmbedOutputs",
        encode="procengine.token_heads:open_embed_multi",
    ),
    "hidden_states": Workflow(
        name="hidden_states",
        body="procengine.workflows.hidden_states:HiddenStatesBody",
        accept="procengine.workflows.hidden_states:accept",
        register="procengine.workflows.hidden_states:register",
        planner="procengine.workflows.hidden_states:HiddenStatesPlanner",
        forward="procengine.prefill_runner:open_hidden_states",
        postprocess="procengine.embed_outputs:EmbedOutputs",
        encode="procengine.encoder_runner:open_hidden_states",
    ),
    "classify": Workflow(
        name="classify",
        body="procengine.workflows.classify:ClassifyBody",
        accept="procengine.workflows.classify:accept",
        register="procengine.workflows.classify:register",
        planner="procengine.workflows.classify:ClassifyPlanner",
        forward="procengine.label_head:open_classify",
        postprocess="procengine.embed_outputs:EmbedOutputs",
        encode="procengine.label_scores:open_classify",
    ),
    "score": Workflow(
        name="score",
        body="procengine.workflows.score:ScoreBody",
        accept="procengine.workflows.score:accept",
        register="procengine.workflows.score:register",
        planner="procengine.workflows.score:ScorePlanner",
        forward="procengine.label_head:open_score",
        postprocess="procengine.embed_outputs:EmbedOutputs",
        encode="procengine.label_scores:open_score",
    ),
    "reward": Workflow(
        name="reward",
        body="procengine.workflows.reward:RewardBody",
        accept="procengine.workflows.reward:accept",
        register="procengine.workflows.reward:register",
        planner="procengine.workflows.reward:RewardPlanner",
        forward="procengine.label_head:open_reward",
        postprocess="procengine.embed_outputs:EmbedOutputs",
        encode="procengine.label_scores:open_reward",
    ),
    "token_classify": Workflow(
        name="token_classify",
        body="procengine.workflows.classify:ClassifyBody",  # asked for as `classify` is
        accept="procengine.workflows.classify:accept",
        register="procengine.workflows.token_classify:register",
        planner="procengine.workflows.token_classify:TokenClassifyPlanner",
        forward="procengine.label_head:open_token_classify",
        postprocess="procengine.embed_outputs:EmbedOutputs",
    ),
    "score_text": Workflow(
        name="score_text",
        body="procengine.workflows.score_text:ScoreTextBody",
        accept="procengine.workflows.score_text:accept",
        register="procengine.workflows.score_text:register",
        planner="procengine.workflows.score_text:ScoreTextPlanner",
        forward="procengine.text_scores:open_score_text",
        postprocess="procengine.embed_outputs:EmbedOutputs",
    ),
}


def find_workflow(name: str) -> Workflow:
    """Ours, or that of an installed package."""
    return WORKFLOWS[name] if name in WORKFLOWS else installed_workflows()[name]


@cache
def installed_workflows() -> dict[str, Workflow]:
    """What other packages bring, by name. Ours cannot be replaced."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.load() for point in points if point.name not in WORKFLOWS}


def load_part(path: str) -> Any:
    """The object at "module:attribute", imported now."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
