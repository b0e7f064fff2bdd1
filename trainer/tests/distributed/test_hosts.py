"""The watch over the other hosts of a run: a host that is gone is named, and one that is there or has ended is not."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from plumbob.trainer.distributed.hosts import Hosts, watch_hosts
from plumbob.trainer.distributed.world import World


@pytest.fixture
def hosts():
    """Two hosts that beat through one store, as two processes do. The store is on node0."""
    assert watch_hosts(World(0, 1, torch.device("cpu"))).explain() is False  # a run on one host watches nothing
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5)) for _ in "01"]
    for number, store in enumerate(stores):
        store.set(f"plumbob/host/{number}", "0")
    names = {"0": "node0", "1": "node1"}
    both = [Hosts(names, str(number), store) for number, store in enumerate(stores)]
    yield both
    for host in both:
        host.leave()


@pytest.mark.slow
def test_after_an_error_a_host_that_still_beats_is_not_blamed_and_a_killed_one_is_named(hosts, capfd):
    first, second = hosts
    first.started("Resume with --resume runs/r")
    assert first.explain() is False and second.explain() is False
    second._stop.set()  # its threads end, as those of a killed process
    assert first.explain() is True
    assert capfd.readouterr().err.splitlines()[-1] == (
        "The host node1 (--machine-rank 1) is gone: its processes have ended, or the network no longer reaches it. "
        "Resume with --resume runs/r"
    )


def test_a_host_that_has_ended_by_itself_is_no_loss(hosts):
    first, second = hosts
    second.leave()
    deadline = 100
    while first._beats["1"][0] != "left" and deadline:
        first._stop.wait(0.1)
        deadline -= 1
    assert first._beats["1"][0] == "left"
    first._answered = float("inf")  # the store does answer
    assert first._silent(seconds=0.0) is None
