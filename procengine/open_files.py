"""How many files this process may open, and how many clients that is enough for.

Owns: the two limits of the system and the arithmetic. Never does: count what is open.

It matters more than it should: libzmq ends the process when it cannot accept a connection for want of a descriptor, so
a group stops listening before (`procs/client_listener.py`).
"""

from __future__ import annotations

import resource

__all__ = ["backlog_within", "clients_within", "connections_within", "files_for", "hard_limit", "raise_limit"]

_OWN_FILES = 64  # of a process without clients: sockets, pipes, rings, a terminal; about half of it is used
_ENDLESS = 1 << 30
_MAX_BACKLOG = 4096  # the system may allow fewer


def hard_limit() -> int:
    """The most files that a process of this user may be allowed to open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENDLESS if hard == resource.RLIM_INFINITY else hard


def raise_limit(num_files: int) -> int:
    """Allow this process that many, or as many as the hard limit does. Returns what it may open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENDLESS
    wanted = max(soft, min(num_files, hard_limit()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def clients_within(num_files: int) -> int:
    """How many clients a process that may open `num_files` can serve: a third of what is left over. The rest is for
    those who connect beyond the limit, to be told so, and for those who do while the door is being shut.
    """
    return max((num_files - _OWN_FILES) // 3, 1)


def files_for(num_clients: int) -> int:
    """The inverse: one connection a client, in the frontend and in the output process."""
    return 3 * num_clients + _OWN_FILES


def connections_within(num_clients: int) -> int:
    """With how many connections to shut the door."""
    return num_clients + max(num_clients // 3, 1)


def backlog_within(num_files: int) -> int:
    """How many connections may wait to be accepted: they come in also behind a shut door."""
    return min(max((num_files - _OWN_FILES) // 6, 1), _MAX_BACKLOG)
