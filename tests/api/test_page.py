"""The page at `/` in a browser: a chat that streams, stops and says how likely it was, and the group beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.browser import Browser
from tests.procs.canary import expect_idle
from tests.procs.harness import Served

pytestmark = pytest.mark.slow

DONE = "!running && document.querySelector('article:last-child .about') !== null"
ANSWER = "document.querySelector('article:last-child .text').textContent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "browser") as opened:
        yield opened


def fill(browser: Browser, **fields: Any) -> None:
    for name, value in fields.items():
        browser.eval(f"document.querySelector('[name={name}]').value = {str(value)!r}; keepFields()")


def ask(browser: Browser, text: str) -> None:
    browser.click("#prompt")
    browser.type(text)
    browser.press("Enter")


def open_page(browser: Browser, group: Served) -> None:
    browser.open(group.ready["http"])
    browser.wait("document.querySelectorAll('#processes li').length > 0")


def test_a_conversation(serve: Callable[..., Served], browser: Browser) -> None:
    group = serve("--port", 0, "--mock-step-ms", 5)
    open_page(browser, group)
    assert browser.eval("model.value") == group.ready["model"]
    browser.wait("[...document.querySelectorAll('#processes li')].every(one => one.className == 'ready')")
    fill(browser, max_tokens=60, temperature=0.5, system="Be short.")
    ask(browser, "Why is the sky <b>blue</b>?")
    browser.wait(DONE)
    # Every token is a piece of the text, and they are all of it.
    assert browser.eval("turns[1].pieces.map(one => one.text).join('') === turns[1].content && turns[1].content") == (
        browser.eval(ANSWER)
    )
    assert browser.eval("document.querySelectorAll('.token').length") > 30
    assert "+ 60 tokens" in browser.eval("document.querySelector('article:last-child .about').textContent")
    assert browser.eval("document.querySelector('article.user .text').innerHTML").startswith("Why is the sky &lt;b&gt;")
    browser.point_at(".token:nth-child(3)")
    assert "%" in browser.wait("!tip.hidden && tip.textContent")
    browser.eval("document.querySelector('article:last-child .text').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    assert browser.eval("document.querySelector('.token.current') === document.querySelectorAll('.token')[1]")
    assert "%" in browser.eval("said.textContent")
    ask(browser, "And now?")
    browser.wait("turns.length === 4 && " + DONE)
    assert browser.eval("bodyOf().messages.map(one => one.role).join()") == "system,user,assistant,user,assistant"
    browser.eval("location.reload()")
    browser.wait("document.readyState === 'complete' && document.querySelectorAll('article').length === 4")
    assert browser.eval("document.querySelector('[name=max_tokens]').value") == "60"
    browser.click("#new")
    assert browser.eval("document.querySelectorAll('article').length") == 0
    assert browser.complaints == []
    assert all(url.startswith((group.ready["http"], "data:")) for url in browser.asked)


def test_stop_stops_the_group_too(serve: Callable[..., Served], browser: Browser) -> None:
    group = serve("--port", 0, "--mock-step-ms", 30)
    open_page(browser, group)
    ask(browser, "hi")
    browser.wait("document.querySelectorAll('.token').length > 3")
    browser.wait("running && Number(document.querySelector('#running').textContent) === 1")
    assert browser.eval("getComputedStyle(document.querySelector('#send')).display") == "none"
    browser.click("#stop")
    browser.wait(DONE)
    expect_idle(group, 10.0)
    assert "stopped" in browser.eval("document.querySelector('article:last-child .about').textContent")
    ask(browser, "again")
    browser.wait("document.querySelectorAll('article:last-child .token').length > 3")
    browser.press("Escape")
    browser.wait(DONE)
    expect_idle(group, 10.0)
    assert browser.complaints == []


def test_errors_and_a_process_that_is_ill_are_shown(serve: Callable[..., Served], browser: Browser) -> None:
    group = serve("--port", 0, "--mock-step-ms", 5)
    open_page(browser, group)
    fill(browser, max_tokens=10**6)
    ask(browser, "hi")
    browser.wait(DONE)
    assert "max_tokens" in browser.eval("document.querySelector('article:last-child .error').textContent")
    fill(browser, max_tokens=5)
    ask(browser, "hi")
    browser.wait("turns.length === 2 && !turns[1].error && " + DONE)
    os.kill(group.pids["output"], signal.SIGSTOP)
    try:
        browser.wait("[...document.querySelectorAll('#processes li.bad')].map(one => one.textContent)[0]")
        assert browser.eval("document.querySelector('#processes li.bad').textContent") == "output silent"
    finally:
        os.kill(group.pids["output"], signal.SIGCONT)
    browser.wait("document.querySelector('#processes li.bad') === null")
    group.stop()
    browser.wait("!document.querySelector('#strip-note').hidden")


def test_the_key_is_asked_for_and_kept_in_the_tab(serve: Callable[..., Served], browser: Browser) -> None:
    group = serve("--port", 0, "--api-key", "s3cret")
    browser.open(group.ready["http"])
    browser.wait("document.querySelector('#key-dialog[open]') !== null")
    for given, answer in (
        ("wrong", "!document.querySelector('#key-wrong').hidden"),
        ("s3cret", "!model.disabled || model.value !== '…'"),
    ):
        browser.eval(
            f"document.querySelector('#key').value = {given!r}; document.querySelector('#key-form').requestSubmit()"
        )
        browser.wait(answer)
    browser.wait("document.querySelectorAll('#processes li').length > 0")
    fill(browser, max_tokens=5)
    ask(browser, "hi")
    browser.wait(DONE)
    assert browser.eval("turns[1].content")
    browser.eval("location.reload()")
    browser.wait("document.querySelectorAll('#processes li').length > 0")
    assert browser.eval("document.querySelector('#key-dialog[open]') === null")
    assert not any("s3cret" in url for url in browser.asked)


def test_an_event_source_goes_on_with_a_stream_and_knows_its_end(
    serve: Callable[..., Served], browser: Browser
) -> None:
    open_page(browser, serve("--port", 0, "--mock-step-ms", 5))
    asked = """fetch("v1/completions", {
        method: "POST",
        headers: {"Content-Type": "application/json", "X-Request-Id": "one", "X-Procengine-Resume-Window": "30"},
        body: JSON.stringify({prompt: "hi", max_tokens: 100, ignore_eos: true, stream: true}),
      }).then(answer => answer.body.getReader()).then(reader => reader.read().then(() => reader.cancel()))"""
    browser.eval(asked)
    browser.eval("""source = new EventSource("v1/streams/one"), got = [];
      source.onmessage = event => got.push([Number(event.lastEventId), event.data]); 1""")
    # It comes back by itself behind the end, and is told that there is no more.
    browser.wait("source.readyState === EventSource.CLOSED")
    assert browser.eval("got.every(([id], at) => id === at + 1) && got.at(-1)[1]") == "[DONE]"


def test_it_can_be_used_without_seeing_it_and_in_the_dark(serve: Callable[..., Served], browser: Browser) -> None:
    group = serve("--port", 0)
    open_page(browser, group)
    fill(browser, max_tokens=20)
    ask(browser, "hi")
    browser.wait(DONE)
    browser.eval("document.querySelector('#show-parameters').click()")
    names = browser.names()
    interactive = {"button", "textbox", "spinbutton", "checkbox", "combobox", "meter", "log", "dialog", "group"}
    assert all(name.strip() for role, name in names if role in interactive), [one for one in names if not one[1]]
    assert {role for role, _ in names} >= {"main", "heading", "log", "textbox", "spinbutton", "complementary", "meter"}
    assert browser.eval("document.documentElement.lang") == "en"
    colours = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for of in ("body", ".dim", "dt", ".about", "#send", "article.user .text"):
            assert browser.eval(CONTRAST % of) >= 4.5, (scheme, of)
        colours.append(browser.eval("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2
    browser.resize(400, 800)  # a telephone: nothing runs out of the page sideways
    assert browser.eval("document.documentElement.scrollWidth") <= 400
    assert browser.complaints == []


# The contrast of an element's text with what is behind it (WCAG 2.2).
CONTRAST = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const element = document.querySelector("%s"), behindOf = one => getComputedStyle(one).backgroundColor;
  let behind = element;
  while (behind !== document.body && parse(behindOf(behind))[3] === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, behindOf(behind)].map(colour => light(parse(colour)));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})()"""
