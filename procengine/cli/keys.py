"""`procengine keys`: makes the key files of tcp connections.

Owns: the arguments and what is said. Never does: print a secret key.
"""

from __future__ import annotations

import argparse

from procengine.cli.examples import add_examples

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Make the keys that a group and its clients know each other by on tcp connections (ZeroMQ's CURVE).\n"
        "The server file goes to `procengine serve --listen tcp://ADDRESS:PORT --curve-keys`, the client file to the\n"
        "client's machine, and there to `Client(..., curve_keys=...)` or --curve-keys. A group reads its list of\n"
        "clients when it starts. Files are their owner's alone (mode 600)."
    )
    add_examples(
        parser,
        ("procengine keys new prod", "a group's keys, and those of a first client"),
        ("procengine keys add prod laptop", "keys of one more client of that group"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="keys of a group, and of its first client")
    new.add_argument("name", metavar="NAME", help="what both files are called")
    add = actions.add_parser("add", help="keys of one more client")
    add.add_argument("name", metavar="NAME", help="name or path of the group's server file")
    add.add_argument("client", metavar="CLIENT", help="name of the client")


def run(args: argparse.Namespace) -> int:
    """Make the files, say where they are."""
    from procengine.curve_keys import add_client, load_client_keys, new_keys

    if args.action == "new":
        server, client = new_keys(args.name)
        print(f"server: {server}\nclient: {client}")
    else:
        client = add_client(args.name, args.client)
        print(f"client: {client}")
    print(f"the group's public key: {load_client_keys(str(client)).server}")
    return 0
