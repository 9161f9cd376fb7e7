"""`PairTemplate`: how a query and a document become one prompt for a model that reranks.

Owns: the placeholders, and Qwen3-Reranker's template. Never does: tokenize, or read a file.
"""

from __future__ import annotations

import re
from typing import Final

from procengine.errors import ConfigError, InvalidRequestError

__all__ = ["DEFAULT_INSTRUCTION", "QWEN3_RERANKER", "PairTemplate"]

DEFAULT_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"

# As its model card has it (Zhang et al. 2025, arXiv:2506.05176).
QWEN3_RERANKER: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)

_PLACEHOLDER = re.compile(r"\{(query|document|instruction)\}")


class PairTemplate:
    """A text with {query} and {document}, each once, and {instruction} at most once. Other braces are braces.
    `instruction` is put in where a request has none.

    Raises:
        ConfigError: it is none.
    """

    def __init__(self, text: str, instruction: str | None = None) -> None:
        self._instruction = instruction or DEFAULT_INSTRUCTION
        self._parts = _PLACEHOLDER.split(text)  # texts, and between them the names of placeholders
        counts = {name: self._parts[1::2].count(name) for name in ("query", "document", "instruction")}
        if counts["query"] != 1 or counts["document"] != 1 or counts["instruction"] > 1:
            raise ConfigError(
                "score_template: must hold {query} and {document} once, and {instruction} at most once; it holds them "
                f"{counts['query']}, {counts['document']} and {counts['instruction']} times"
            )
        self._takes_instruction = counts["instruction"] == 1

    def render(self, query: str, document: str, instruction: str | None = None) -> tuple[str, str]:
        """The prompt up to the document's end, which may be cut, and what stands behind it, which may not.

        Raises:
            InvalidRequestError: there is an instruction, and no place for it.
        """
        if instruction is not None and not self._takes_instruction:
            raise InvalidRequestError("instruction: the template of this model has no place for one")
        values = {"query": query, "document": document, "instruction": instruction or self._instruction}
        texts = [values[part] if index % 2 else part for index, part in enumerate(self._parts)]
        behind = 2 * self._parts[1::2].index("document") + 2
        return "".join(texts[:behind]), "".join(texts[behind:])
