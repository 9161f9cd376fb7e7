"""`Service`: what routes work with: the link to the group, and what is known of the model.

Owns: names of the model, its tokenizer and template for what is not generation. Never does: know a route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from procengine.api.answer import AnswerFacts
from procengine.api.errors import ApiError
from procengine.api.group_link import GroupLink
from procengine.api.group_status import GroupStatus
from procengine.api.logprobs import TokenNames
from procengine.api.lora_link import LoraLink
from procengine.api.resumable_streams import ResumableStreams
from procengine.chat_template import ChatTemplate
from procengine.client_link import new_call_seed
from procengine.config import EngineConfig
from procengine.detokenizer import Detokenizer
from procengine.errors import EngineDeadError, InvalidRequestError, ShuttingDownError
from procengine.messages import Welcome
from procengine.tokenizer import Tokenizer

__all__ = ["Service"]

_T = TypeVar("_T")


class Service:
    """One process's. `link` is set once, when the process is wired."""

    def __init__(
        self, config: EngineConfig, link: GroupLink, status: GroupStatus, lora: LoraLink | None = None
    ) -> None:
        self.config = config
        self.link = link
        self.status = status
        self.lora = lora  # None: adapters stay as they are
        self.tokenizer = Tokenizer.load(config.model.tokenizer_path)
        self.streams = ResumableStreams()
        self.is_draining = False
        self.error: str | None = None  # why the group ends, if it does with an error
        self.started_s = int(time.time())
        self.adapters = {module.name: module.path for module in config.lora.modules}  # paths by what requests call them
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._token_bytes = Detokenizer(self.tokenizer).token_bytes
        model = config.model
        self._template = (
            ChatTemplate(model.chat_template, model.chat_bos_token, model.chat_eos_token)
            if model.chat_template
            else None
        )

    @property
    def welcome(self) -> Welcome:
        """What the group said of itself.

        Raises:
            EngineDeadError: it has not yet.
        """
        if not self.link.is_attached or self.link.welcome is None:
            raise EngineDeadError("the group is still starting; try again later")
        return self.link.welcome

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may call the model."""
        return self.config.api.served_model_names or (self.config.model.name,)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for another model than the one that is served."""
        if name is not None and name not in self.model_names:
            if name in self.adapters:
                raise ApiError(400, f"model: {name} is an adapter, which is for generation", param="model")
            served = ", ".join((*self.model_names, *self.adapters))
            message = f"model: there is no model {name!r} here; there is: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_for_generation(self, name: str | None) -> str:
        """The adapter that a request for generation names as its model; "" if it names none.

        Raises ApiError 404: it names neither one of those nor the model.
        """
        if name is not None and name in self.adapters:
            return name
        self.check_model(name)
        return ""

    def check_workflow(self, workflow: str) -> None:
        """Raises ApiError for what the model does not do, or the group does no more."""
        if self.error is not None:
            raise EngineDeadError(self.error)
        if self.is_draining:
            raise ShuttingDownError("the group is shutting down and takes no new requests")
        if workflow not in self.welcome.workflows:
            raise ApiError(400, f"{workflow}: not supported by this model", code="unsupported_workflow")

    def answer_facts(self, answer_id: str, adapter: str = "", *, tokens_as_ids: bool = False) -> AnswerFacts:
        """What an answer says of itself."""
        names = TokenNames(self._token_bytes, as_ids=tokens_as_ids)
        return AnswerFacts(answer_id, int(time.time()), adapter or self.model_names[0], names, new_call_seed())

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """What takes too long for the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the frontend would make of a conversation.

        Raises:
            InvalidRequestError: the model has no template, or that refuses them.
        """
        if self._template is None:
            raise InvalidRequestError("messages: this model has no chat template; send a prompt instead")
        return self._template.render(messages, add_generation_prompt, tools)
