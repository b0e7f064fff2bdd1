"""The hosts of a run on several machines: one that dies, or that the network no longer reaches, is named within seconds.

Collectives alone do not do that: they raise an error that has no host's name, or wait for half an hour if the host went
without closing its connections. So one process of each host writes a beat every second into the launcher's store (the
one at MASTER_ADDR, through which processes find each other), and reads those of the other hosts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from plumbob.trainer.distributed.world import World

BEAT = 1.0
"""Seconds between two beats of a host."""

SILENCE = 20.0
"""A host whose last beat is older than this, in seconds, is lost."""

SILENCE_IN_SET_UP = 120.0
"""The same during set-up, where a long call into C, such as reading the weights of a model, may hold up the beats."""

SILENCE_AFTER_ERROR = 4.0
"""The same after a collective has failed, when it is certain that something is wrong."""

LEFT = "left"
"""What a host writes in place of a beat when its processes have ended by themselves."""


class Hosts:
    """The other hosts of the run, as seen from this process. In a run on a single host, it does nothing."""

    def __init__(self, names: dict[str, str], own: str, store: dist.Store | None) -> None:
        """`names`: host's number (--machine-rank) -> its name. `store`: None in processes that write no beats."""
        self.names, self.own, self._store = names, own, store
        self._advice, self._patience = "", SILENCE_IN_SET_UP
        now = time.monotonic()
        self._beats: dict[str, tuple[str, float]] = {host: ("", now) for host in names if host != own}
        """Host -> (its last beat, when that was first seen here)."""
        self._answered = now
        """When the store last answered. It is on the host with number 0."""
        self._stop = threading.Event()
        if store is not None and len(names) > 1:
            threading.Thread(target=self._beat, daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()

    def started(self, advice: str) -> None:
        """Note that set-up has ended. `advice`: what to do about a lost host, as a sentence."""
        self._advice, self._patience = advice, SILENCE

    def _beat(self) -> None:
        """Write this host's beats and read those of the others, until the run ends."""
        assert self._store is not None
        number = 0
        while not self._stop.wait(BEAT):
            number += 1
            try:
                self._store.set(_key(self.own), str(number))
                for host, (last, _) in list(self._beats.items()):
                    if (beat := self._store.get(_key(host)).decode()) != last:
                        self._beats[host] = beat, time.monotonic()
                self._answered = time.monotonic()
            except RuntimeError:  # the store is gone, or did not answer in time; `_watch` notices if it stays away
                continue

    def _watch(self) -> None:
        """End this process if a host is lost: its collectives would wait for it. The launcher ends the others here."""
        while not self._stop.wait(BEAT):
            if lost := self._silent(self._patience):
                self._say(lost)
                os._exit(1)

    def _silent(self, seconds: float) -> str | None:
        """The number of a host that has been silent for so long; None without one."""
        now = time.monotonic()
        if now - self._answered > seconds:  # without the store, nothing is known of the other hosts
            return "0"
        return next((h for h, (beat, seen) in self._beats.items() if beat != LEFT and now - seen > seconds), None)

    def explain(self) -> bool:
        """After an error in a collective: name the host that is gone, if one is, on stderr; returns whether one is."""
        if self._store is None or len(self.names) == 1:
            return False
        deadline = time.monotonic() + SILENCE_AFTER_ERROR + 2 * BEAT
        while time.monotonic() < deadline:
            left = next((host for host, (beat, _) in self._beats.items() if beat == LEFT), None)
            if lost := left or self._silent(SILENCE_AFTER_ERROR):
                self._say(lost)
                return True
            time.sleep(0.2)
        return False

    def _say(self, host: str) -> None:
        print(
            f"The host {self.names[host]} (--machine-rank {host}) is gone: its processes have ended, or the network "
            f"no longer reaches it. {self._advice}",
            file=sys.stderr,
            flush=True,
        )

    def leave(self) -> None:
        """Stop watching, and tell the other hosts that this one ends by itself."""
        if self._stop.is_set() or self._store is None or len(self.names) == 1:
            return
        self._stop.set()
        with suppress(RuntimeError):  # host 0 has ended already
            self._store.set(_key(self.own), LEFT)


def watch_hosts(world: World) -> Hosts:
    """Begin to watch the other hosts of a run. Collective."""
    own = os.environ.get("GROUP_RANK", "0")  # set by torchrun and `accelerate launch`: the number of the machine
    names = dict(world.gather((own, socket.gethostname())))
    store = None
    if len(names) > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own, because calls on a shared one wait for each other.
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SILENCE_IN_SET_UP))
        store.set(_key(own), "0")
    world.barrier()
    return Hosts(names, own, store)


def _key(host: str) -> str:
    return f"plumbob/host/{host}"
