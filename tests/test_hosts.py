"""The commands of docs/guides/many_gpus.md for two hosts and a server on a third, run as they stand on the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.testing import hosts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "many_gpus.md"


def test_the_page_has_a_command_for_every_host():
    commands = hosts.commands_of(PAGE)
    assert list(commands) == ["server", "node0", "node1", "node0, to resume", "node1, to resume"]
    for first, second in (("node0", "node1"), ("node0, to resume", "node1, to resume")):
        assert commands[second] == commands[first].replace("--machine-rank 0", "--machine-rank 1")


@pytest.mark.slow
@pytest.mark.long
def test_a_run_on_two_hosts_gets_its_weights_to_the_server_and_survives_the_loss_of_one(tmp_path):
    """node1 is killed: node0 ends, and the page's next commands go on."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    command = [sys.executable, hosts.__file__, str(tmp_path / "net"), str(PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PAGE.parents[2], check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    # Both hosts sampled from the server, which got an adapter before the first step and after each.
    assert report["clients"] == ["10.0.0.11", "10.0.0.12"]
    assert report["adapters_loaded"] >= 4 and report["versions"] == [2, 3, 4] and report["parity"] < 0.25
    assert report["killed"]["code"] == 1 and 1 <= report["killed"]["steps"] < 3
    assert report["codes"] == [0, 0], report["resumed"]
    assert report["steps"] == [1, 2, 3]
