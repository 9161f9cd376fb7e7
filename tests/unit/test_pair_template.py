"""How pairs are written: placeholders, and what is no template."""

from __future__ import annotations

import pytest

from procengine.errors import ConfigError, InvalidRequestError
from procengine.pair_template import DEFAULT_INSTRUCTION, QWEN3_RERANKER, PairTemplate


def test_everything_up_to_the_documents_end_may_be_cut() -> None:
    template = PairTemplate("I: {instruction} D: {document}; Q: {query}?")
    assert template.render("q", "d", "i") == ("I: i D: d", "; Q: q?")


def test_texts_are_put_in_as_they_are() -> None:
    template = PairTemplate("{q}{query}|{document}{}")
    assert template.render("{document}", "{query}") == ("{q}{document}|{query}", "{}")


def test_the_instruction_is_the_requests_or_the_templates_own() -> None:
    assert DEFAULT_INSTRUCTION in PairTemplate(QWEN3_RERANKER).render("q", "d")[0]
    assert "<Instruct>: find\n<Query>: q\n" in PairTemplate(QWEN3_RERANKER, "find").render("q", "d")[0]
    with pytest.raises(InvalidRequestError, match="instruction: the template of this model has no place"):
        PairTemplate("{query}{document}").render("q", "d", "i")


@pytest.mark.parametrize(
    "text", ["", "{query}", "{document}{document}{query}", "{query}{document}" + "{instruction}" * 2]
)
def test_what_is_no_template_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"score_template: must hold \{query\} and \{document\} once"):
        PairTemplate(text)
