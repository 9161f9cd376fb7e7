"""Chat templates that came with a hostile file: each operation is bounded, and all together in time."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest

from procengine.chat_template import ChatTemplate
from procengine.errors import InvalidRequestError, ModelError
from procengine.interruptible import Interrupted, Interruptible

_MESSAGES = [{"role": "user", "content": "hi"}]

TOO_MUCH = [
    "{{ 2 ** 10000000000 }}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * ['x'] }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x'|center(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "{{ lipsum(1000000) }}",
    "{{ range(10000000000)|list }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "{% set s = 'x' * 1000000 %}{{ range(99999)|map('string')|join(s) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
]


@pytest.mark.parametrize("source", TOO_MUCH)
def test_an_operation_that_would_take_everything_is_refused(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((InvalidRequestError, ModelError), match="chat template"):
            ChatTemplate(source).render(_MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ '-' * 40 }}", "-" * 40),
        ("{{ '%-5s|' % 'a' }}{{ '%05.2f'|format(1.5) }}{{ '{:>4}'.format(7) }}", "a    |01.50   7"),
        ("{{ 2 ** 10 + 3 % 2 }}", "1025"),
        ("{{ [1, 2] + [3] }}{{ 'x' + 'y' }}", "[1, 2, 3]xy"),
        ("{{ 'a,b'.split(',')|join('-')|upper }}{{ ['b', 'a']|sort|first }}", "A-Ba"),
        ("{{ messages[0]['content']|trim|replace('h', 'H') }}{{ {'a': 1}|tojson }}", 'Hi{"a": 1}'),
    ],
)
def test_what_templates_do_goes_on(source: str, text: str) -> None:
    assert ChatTemplate(source).render(_MESSAGES) == text


@pytest.mark.parametrize(
    "source", ["{% for i in x %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 3000, "{{ 1" + " + 1" * 9000 + " }}"]
)
def test_a_template_that_python_cannot_compile_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source)


def test_code_without_end_is_ended_and_the_thread_goes_on() -> None:
    stretch, outcome = Interruptible(), []
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")

    def work() -> None:
        for _ in range(2):
            try:
                stretch.run(lambda: template.render(_MESSAGES))
            except Interrupted:
                outcome.append("ended")
        outcome.append(stretch.run(lambda: "went on"))

    thread = threading.Thread(target=work)
    thread.start()
    deadline_s = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline_s:
        stretch.end_if_longer_than(0.05)
        thread.join(0.01)
    assert outcome == ["ended", "ended", "went on"]
    assert not stretch.end_if_longer_than(0.0), "nothing runs, so nothing is ended"
