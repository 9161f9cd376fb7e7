"""Results and streams with the calls taken out of their text."""

from __future__ import annotations

import msgspec
import pytest

from procengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from procengine.tool_calls import FunctionCall, FunctionCallDelta, ToolCallDelta
from procengine.tool_calls.reading import CallStream, read_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def result(*texts: str, reason: str = "stop") -> RequestOutput:
    outputs = [CompletionOutput(index, text, [1, 2], reason) for index, text in enumerate(texts)]
    return RequestOutput("r", None, [1], outputs, finished=True)


def test_calls_of_each_choice_are_taken_out() -> None:
    read = read_calls(result(f"So: {CALL}", "No.", CALL + CALL), "hermes", "seed")
    assert [output.text for output in read.outputs] == ["So: ", "No.", ""]
    assert [output.finish_reason for output in read.outputs] == ["tool_calls", "stop", "tool_calls"]
    calls = [[call.function for call in output.tool_calls or []] for output in read.outputs]
    f = FunctionCall("f", '{"a": 1}')
    assert calls == [[f], [], [f, f]]
    ids = [call.id for output in read.outputs for call in output.tool_calls or []]
    assert len(set(ids)) == 3
    assert all(output.token_ids == [1, 2] for output in read.outputs)


def test_without_a_style_the_result_is_left_as_it_is() -> None:
    assert read_calls(result(CALL), None, "seed") == result(CALL)
    delta = StreamDelta("r", 0, CALL, [1], "stop")
    assert CallStream(None, "seed").read(delta) is delta


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_choice_that_was_cut_keeps_its_reason(reason: str) -> None:
    cut = CALL[: CALL.index(" 1}")]
    (output,) = read_calls(result(cut, reason=reason), "hermes", "seed").outputs
    assert output.finish_reason == reason
    assert [call.function.arguments for call in output.tool_calls or []] == ['{"a":']


def test_deltas_of_several_choices_add_up_to_the_result() -> None:
    texts = [f"So: {CALL}", "No <tool", CALL + "\n" + CALL]
    stream, deltas = CallStream("hermes", "seed"), []
    for position in range(max(map(len, texts))):
        for index, text in enumerate(texts):
            if position < len(text):
                reason = "stop" if position == len(text) - 1 else None
                deltas.append(stream.read(StreamDelta("r", index, text[position], [position], reason)))
    whole = read_calls(result(*texts), "hermes", "seed")
    for output in whole.outputs:
        mine = [delta for delta in deltas if delta.index == output.index]
        assert [delta.token_ids for delta in mine] == [[position] for position in range(len(texts[output.index]))]
        assert "".join(delta.text for delta in mine) == output.text
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
        calls = [call for delta in mine for call in delta.tool_calls or []]
        assert all(delta.tool_calls is None or delta.tool_calls for delta in mine)
        for index, call in enumerate(output.tool_calls or []):
            parts = [part for part in calls if part.index == index]
            assert (parts[0].id, parts[0].type, parts[0].function.name) == (call.id, "function", "f")
            assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_the_last_delta_has_what_was_held_back() -> None:
    stream = CallStream("hermes", "seed")
    assert stream.read(StreamDelta("r", 0, "a <tool", [1])).text == "a "
    last = stream.read(StreamDelta("r", 0, "_ca", [2], "length"))
    assert (last.text, last.tool_calls, last.finish_reason) == ("<tool_ca", None, "length")


def test_the_last_delta_may_have_the_end_of_a_call_or_come_after_it() -> None:
    for ends in (["}}</tool_call>"], ["}}</tool_call>", ""]):
        stream = CallStream("hermes", "seed")
        first = stream.read(StreamDelta("r", 0, '<tool_call>{"name": "f", "arguments": {"a": 1', [1]))
        (call,) = first.tool_calls or []
        assert call.function == FunctionCallDelta('{"a": 1', "f")
        rest = [
            stream.read(StreamDelta("r", 0, end, [2], "stop" if is_last else None))
            for end, is_last in zip(ends, [*[False] * (len(ends) - 1), True], strict=True)
        ]
        assert [part for delta in rest for part in delta.tool_calls or []] == [ToolCallDelta(0, FunctionCallDelta("}"))]
        assert rest[-1].finish_reason == "tool_calls"


def test_a_result_is_json_in_the_shape_of_openais() -> None:
    (output,) = read_calls(result(CALL), "hermes", "seed").outputs
    (call,) = msgspec.to_builtins(output)["tool_calls"]
    assert call == {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
