"""`procengine generate MODEL PROMPT...`: launches a private group, answers, tears it down.

Owns: how answers look on stdout. Never does: print anything else there.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.examples import add_examples
from procengine.cli.sampling_args import add_sampling_arguments, sampling_params_from
from procengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from procengine.client import Client
    from procengine.client_bodies import Body
    from procengine.outputs import RequestOutput

__all__ = ["add_arguments", "run"]

_MAX_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Launch a group, complete the prompts, tear it down. The text of one prompt streams to a terminal as it comes."
    )
    add_examples(
        parser,
        ('procengine generate smollm2-135m "Once upon a time" --max-tokens 40', "one text, as it comes"),
        ('procengine generate smollm2-135m "2 + 2 =" "3 + 3 =" --json', "two prompts, JSON lines"),
        ('procengine generate smollm2-135m "Is ice cold?" --chat --choice yes --choice no', "one of two answers"),
        ("procengine generate smollm2-135m - --temperature 0.8 --seed 1 < prompt.txt", "a prompt from a file"),
    )
    add_engine_arguments(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="text to go on from; - reads one from stdin")
    parser.add_argument("--chat", action="store_true", help="ask each prompt as a user's message, by the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    parser.add_argument("--echo", action="store_true", help="begin each text with the prompt's")
    add_sampling_arguments(parser, temperature=0.0, max_tokens=_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    """Answer and print."""
    from procengine.client import Client
    from procengine.client_bodies import generate_body
    from procengine.launch import launch_group
    from procengine.resolve import resolve

    params = sampling_params_from(args)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    config = resolve(engine_args_from(args, default_name=f"generate-{os.getpid()}"))
    with launch_group(config) as group, Client(group.endpoint) as client:
        if len(prompts) == 1 and params.n == 1 and not args.json and sys.stdout.isatty():
            _stream(client, prompts[0], params, is_chat=args.chat, echo=args.echo)
        else:
            bodies = [_body(prompt, is_chat=args.chat) for prompt in prompts]
            results = client.generate_bodies([generate_body(body, params, echo=args.echo) for body in bodies])
            _print_all(results, prompts, as_json=args.json)
    return 0


def _stream(client: Client, prompt: str, params: SamplingParams, *, is_chat: bool, echo: bool) -> None:
    asked: dict[str, Any] = {"messages": _messages(prompt)} if is_chat else {"prompt": prompt}
    for delta in client.stream(**asked, params=params, echo=echo):
        print(delta.text, end="", flush=True)
    print()


def _body(prompt: str, *, is_chat: bool) -> Body:
    from procengine.client_bodies import messages_body, prompt_body

    return messages_body(_messages(prompt)) if is_chat else prompt_body(prompt)


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _print_all(results: list[RequestOutput], prompts: list[str], *, as_json: bool) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        if as_json:
            print(msgspec.json.encode(_as_object(prompt, result)).decode())
        else:
            for output in result.outputs:
                print(output.text)


def _as_object(prompt: str, result: RequestOutput) -> dict[str, Any]:
    num_prompt = len(result.prompt_token_ids)
    num_new = sum(len(output.token_ids) for output in result.outputs)
    return {
        "request_id": result.request_id,
        "prompt": prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "prompt_logprobs": result.prompt_logprobs,
        "outputs": result.outputs,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "cached_tokens": result.num_cached_tokens or 0,
        },
    }
