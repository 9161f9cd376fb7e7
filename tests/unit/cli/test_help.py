"""What `--help` teaches: each command has a sentence, examples that can be run, and says its defaults."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

import pytest

from procengine.cli.main import whole_parser


def parsers_of(
    parser: argparse.ArgumentParser, path: str = "procengine"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from parsers_of(sub, f"{path} {name}")


WHOLE = whole_parser()
PARSERS = dict(parsers_of(WHOLE))
TAUGHT = {path: parser for path, parser in PARSERS.items() if not path.startswith("procengine keys ")}


def example_lines(parser: argparse.ArgumentParser) -> list[str]:
    """The command lines behind `examples:`, without what they mean."""
    _, _, epilog = parser.format_help().partition("\nexamples:\n")
    return [line.split("  # ")[0].strip() for line in epilog.splitlines() if line.startswith("  ")]


def arguments_in(line: str) -> list[str]:
    """What the shell would give to `procengine`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    begin = words.index("procengine") + 1
    ends = [number for number, word in enumerate(words) if number > begin and set(word) <= set("<>()|&;")]
    return words[begin : min([*ends, len(words)])]


@pytest.mark.parametrize("path", TAUGHT)
def test_help_begins_with_a_sentence_and_ends_with_examples(path: str) -> None:
    parser = TAUGHT[path]
    assert parser.description is not None
    assert parser.description[0].isupper()
    assert "." in parser.description
    assert len(example_lines(parser)) >= 2
    assert all("  # " in line for line in (parser.epilog or "").splitlines() if line.startswith("  "))


@pytest.mark.parametrize(("path", "line"), [(path, line) for path in TAUGHT for line in example_lines(TAUGHT[path])])
def test_each_example_is_a_right_command_line(path: str, line: str) -> None:
    arguments = arguments_in(line)
    assert f"procengine {' '.join(arguments)} ".startswith(f"{path} "), "it is an example of its own command"
    if "--help" not in arguments:
        WHOLE.parse_args(arguments)


@pytest.mark.parametrize("path", PARSERS)
def test_each_argument_is_explained_and_each_flag_with_a_value_says_what_holds_without_it(path: str) -> None:
    for action in PARSERS[path]._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue  # its commands are explained
        name = "/".join(action.option_strings) or action.metavar
        assert action.help, f"{path} {name}"
        if action.option_strings and action.default not in (None, False, [], "", argparse.SUPPRESS):
            assert "[" in action.help, f"{path} {name}: its default is not shown"
            assert action.help.endswith("]") or "] (" in action.help, f"{path} {name}"


def test_commands_are_listed_beside_their_sentences() -> None:
    lines = PARSERS["procengine"].format_help().splitlines()
    listed = [line for line in lines if line.startswith("    ") and not line.startswith("     ")]
    assert all(len(line.split(maxsplit=1)) == 2 for line in listed)
    assert {line.split()[0] for line in listed} == {path.split()[1] for path in PARSERS if path.count(" ") == 1}
