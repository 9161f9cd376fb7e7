"""A chat template without end holds up nobody but the conversation that it is for, and that not for long."""

from __future__ import annotations

import json
from pathlib import Path

from procengine.messages import Delta, Rejected
from tests.procs.harness import Served, make_model
from tests.procs.raw_client import RawClient, body

_ENDLESS = (
    "{% for a in range(messages[0].content | length * 9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}hi"
)


def test_a_template_without_end_is_ended_and_others_go_on(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": _ENDLESS}))
    with Served(model, tmp_path, "--template-timeout", 0.3) as group, RawClient(group.wait_ready().endpoint) as client:
        for number in range(2):
            client.submit("endless", body(messages=[{"role": "user", "content": "x"}]))
            client.submit("text", body("some text"))
            client.submit("short", body(messages=[{"role": "user", "content": ""}]))
            end = client.wait_end("endless", 30.0)
            assert isinstance(end, Rejected) and end.code == "invalid_request"
            assert end.message == "messages: the model's chat template did not finish within 0.3 s"
            assert all(isinstance(client.wait_end(name, 30.0), Delta) for name in ("text", "short")), number
            client.messages.clear()
        assert group.log == ""
