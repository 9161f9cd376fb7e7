"""How many clients the limit of open files is enough for."""

from __future__ import annotations

import resource

import pytest

from procengine.open_files import backlog_within, clients_within, connections_within, files_for, hard_limit, raise_limit


@pytest.mark.parametrize("num_clients", [1, 96, 4096, 1 << 20])
def test_files_for_clients_are_enough_for_them(num_clients: int) -> None:
    assert clients_within(files_for(num_clients)) == num_clients


@pytest.mark.parametrize("num_files", [256, 1024, 20_000])
def test_the_door_is_shut_above_the_clients_and_well_below_the_files(num_files: int) -> None:
    num_clients = clients_within(num_files)
    num_connections, backlog = connections_within(num_clients), backlog_within(num_files)
    assert num_clients < num_connections
    assert num_connections + backlog < num_files - num_files // 4


def test_very_few_files_are_still_enough_for_one() -> None:
    assert clients_within(10) == 1
    assert (connections_within(1), backlog_within(10)) == (2, 1)


def test_the_soft_limit_is_raised_as_far_as_needed_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_limit(100) == 256
        wanted = min(300, hard_limit())
        assert raise_limit(wanted) == wanted
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
