"""Processes that play rollouts for the trainer's, so that its own Python is left to the engine and to training.

A process is sent tasks, and asks for completions over a socket; it plays, scores and makes rows as the trainer's process
does. What a rollout is does not depend on who plays it. Each message is its length in 8 bytes, and a pickle.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.rollout import Completion, Engine, EngineError, Sampling
from plumbob.rollout.types import UnsupportedTaskset
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.groups import Group, Played, Rules
from plumbob.trainer.rollouts.tasks import Tasks, load_environments
from plumbob.trainer.run_files.token_record import as_line

if TYPE_CHECKING:
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.distributed.world import World

MOST, CORES_EACH = 6, 2
"""Most processes by default, and cores of the machine for each of them. With so many, the trainer's process waits for the GPU."""
FEWEST_STEPS, FEWEST_GROUPS = 10, 8
"""Fewest steps of a run, and groups of a step for each process, with which they are begun by default: they load for 10 to 20 s."""
KEPT = 4
"""The trainer's process plays one group while each other process plays about so many."""
UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot write."""


def open_processes(
    config: TrainConfig, environments: Sequence[Tasks], rules: Rules, world: World
) -> RolloutProcesses | None:
    """The processes that --rollout-processes asks for, which load beside the first steps. Raises UserError."""
    fit = all(not tasks.toolsets and tasks.driver is None for tasks in environments)
    count = config.rollout_processes
    if count is None:
        first = [type(tasks.train[0]).toolsets for tasks in environments]
        plain = all(getattr(own, "__func__", None) is vf.Task.toolsets.__func__ for own in first)
        count, own_engine = 0, world.device.type == "cuda" and config.engine != "vllm"
        if fit and plain and own_engine and config.max_steps >= FEWEST_STEPS:
            groups = config.rollouts_per_step(world.size) // config.num_generations // world.size
            count = min(MOST, len(os.sched_getaffinity(0)) // world.size // CORES_EACH, groups // FEWEST_GROUPS)
    elif count and not fit:
        raise UserError(
            "--rollout-processes: an environment with shared toolsets, or one that drives the conversation, plays in the "
            "trainer's process alone; leave the option out"
        )
    if not count:
        return None
    try:
        played = pickle.dumps((rules, [tasks.train[0] for tasks in environments]))
        return RolloutProcesses(count, pickle.dumps((sys.path, config, played)))
    except (*UNSENDABLE, OSError) as error:
        if config.rollout_processes is None:
            return None
        raise UserError(f"--rollout-processes: no other process can play the environment: {error}") from None


class RolloutProcesses:
    """Processes of this machine that play groups for an engine of this process."""

    def __init__(self, count: int, given: bytes) -> None:
        """`given`: a pickle of sys.path, the configuration, and a pickle of `Rules` and of a task of each environment."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sockets: list[socket.socket] = []
        for _ in range(count):
            mine, theirs = socket.socketpair()
            with theirs, tempfile.TemporaryFile() as stored:  # to send it over the socket would wait until it is read
                stored.write(given)
                stored.seek(0)
                # In a session of its own: Ctrl-C is for the trainer, which ends the process.
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=stored,
                    stdout=2,  # what environments print is no output of the trainer's
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                )
            self.processes.append(process)
            self.sockets.append(mine)
        self.loading = list(self.sockets)
        """Of processes that have not said yet that they can play."""

    def ready(self) -> bool:
        """Whether all of them have loaded. If one cannot, all are ended, and this process says why and plays alone."""
        while self.loading and select.select(self.loading[:1], [], [], 0)[0]:
            size = int.from_bytes(self.loading[0].recv(8, socket.MSG_WAITALL), "little")
            why = pickle.loads(self.loading[0].recv(size, socket.MSG_WAITALL)) if size else "it ended while it loaded"
            self.loading.pop(0)
            if why:
                self._give_up(why)
        return bool(self.sockets) and not self.loading

    def _give_up(self, why: str) -> None:
        print(f"Rollouts are played in the trainer's process alone: {why}", file=sys.stderr, flush=True)
        self.close()

    def divide(
        self, groups: list[Group], most: int, recorded: bool
    ) -> tuple[list[Group], int, list[tuple[int, bytes]]]:
        """(this process's groups, few of them; how many of their rollouts at once; of each other process the number of groups and
        the message that it is sent). `most`: rollouts at once in all of them together."""
        stride = KEPT * len(self.sockets)
        others = [group for i, group in enumerate(groups) if i % stride]
        own, *parts = groups[::stride], *(others[k :: len(self.sockets)] for k in range(len(self.sockets)))
        ours, *slots = (max(most * len(part) // max(len(groups), 1), 1) for part in (own, *parts))
        try:
            sent = [(len(part), _message(("play", (part, n, recorded)))) for part, n in zip(parts, slots, strict=True)]
        except UNSENDABLE as error:
            self._give_up(f"a task cannot be sent to another process: {error}")
            return groups, most, []
        return own, ours, sent

    async def play(self, parts: Sequence[tuple[int, bytes]], engine: Engine) -> list[Played]:
        """Play the groups of `divide`. Raises RunFailed if a process ends, and what a rollout raises in it."""
        try:
            found = await asyncio.gather(*(self._play(k, *part, engine) for k, part in enumerate(parts)))
        except BaseException:  # what they still play, nobody will read
            self.close()
            raise
        return [one for part in found for one in part]

    def compare(self, here: Sequence[Played], there: Sequence[Played]) -> None:
        """Play alone from now on if rollouts fail in the other processes and not here: these lack something then."""
        failed = [why.reason for one in there for why in one.unusable if why.kind == "errored"]
        ours = any(why.kind == "errored" for one in here for why in one.unusable)
        if here and not ours and 2 * len(failed) > sum(len(one.traces) for one in there):
            self._give_up(f"in other processes most of them fail, and none in this one; the first: {failed[0]}")

    async def _play(self, number: int, count: int, message: bytes, engine: Engine) -> list[Played]:
        process, connection = self.processes[number], self.sockets[number].dup()
        reader, writer = await asyncio.open_connection(sock=connection)
        asked: dict[int, asyncio.Task[Completion]] = {}
        found: list[Played] = []

        def answer(key: int, task: asyncio.Task[Completion]) -> None:
            del asked[key]
            error = EngineError("it was cancelled") if task.cancelled() else task.exception()
            if not writer.is_closing():
                writer.write(_message((key, EngineError(str(error)) if error else task.result())))

        try:
            writer.write(message)
            while len(found) < count:
                match await _received(reader):
                    case Played() as played:
                        found.append(played)
                    case (int(key), None):  # nobody waits for it any more
                        if key in asked:
                            asked[key].cancel()
                    case (int(key), (ids, sampling)):
                        asked[key] = asyncio.create_task(engine.generate(ids, sampling))
                        asked[key].add_done_callback(partial(answer, key))
                    case error:
                        raise error
        except (asyncio.IncompleteReadError, ConnectionError):
            how = f"exit code {process.wait()}"
            said = f"a process that plays rollouts ended ({how}); --rollout-processes 0 does without such processes"
            raise RunFailed(said, cause="rollouts-fail") from None
        finally:
            for task in asked.values():
                task.cancel()
            writer.close()
        return found

    def close(self) -> None:
        """End all processes, whatever they do."""
        for process, connection in zip(self.processes, self.sockets, strict=True):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what its environment has started, too
            connection.close()
            process.wait()
        self.processes, self.sockets, self.loading = [], [], []


def _message(content: Any) -> bytes:
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8, "little") + data


async def _received(reader: asyncio.StreamReader) -> Any:
    return pickle.loads(await reader.readexactly(int.from_bytes(await reader.readexactly(8), "little")))


class _Asking:
    """The trainer's engine, as the process that plays has it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer, self.keys = writer, itertools.count()
        self.waiting: dict[int, asyncio.Future[Completion]] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        key = next(self.keys)
        self.waiting[key] = future = asyncio.get_running_loop().create_future()
        self.writer.write(_message((key, (list(prompt_ids), sampling))))
        try:
            return await future
        except asyncio.CancelledError:
            self.writer.write(_message((key, None)))
            raise
        finally:
            del self.waiting[key]

    def answer(self, key: int, reply: Completion | EngineError) -> None:
        future = self.waiting.get(key)
        if future is None or future.done():
            return
        if isinstance(reply, EngineError):
            future.set_exception(reply)
        else:
            future.set_result(reply)


def _line(trace: vf.Trace | str) -> str:
    try:
        return as_line(trace)
    except Exception as error:  # the traces of the step cannot be written then, as in the trainer's process
        return f"{type(error).__name__}: {error}"


async def _serve(connection: socket.socket) -> None:
    """Play what the trainer's process sends, until it has ended or closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        sys.path[:], config, stored = pickle.loads(sys.stdin.buffer.read())
        load_environments(config)  # an environment may keep something of its own in its modules
        rules: Rules = pickle.loads(stored)[0]
    except Exception as error:
        writer.write(_message(f"another process cannot read its tasks ({type(error).__name__}: {error})"))
        return await writer.drain()
    engine, rounds = _Asking(writer), set[asyncio.Task[None]]()
    writer.transport.set_write_buffer_limits(0)  # `drain` waits until all is sent
    gc.collect()
    gc.freeze()  # what a run of the environment needs stays
    gc.disable()

    async def play(group: Group, slots: asyncio.Semaphore, recorded: bool) -> None:
        try:
            one = await rules.play(group, engine, slots, recorded=recorded)
            if recorded:
                one = replace(one, requests=partial(dict, one.requests()))
            else:
                one = replace(one, traces=[_line(trace) for trace in one.traces])
            message = _message(one)
        except UnsupportedTaskset as error:
            message = _message(UnsupportedTaskset(str(error)))
        except BaseException as error:  # of a class that the trainer's process may not have
            message = _message(RunFailed(f"in a process that plays rollouts: {type(error).__name__}: {error}"))
        writer.write(message)

    async def play_all(groups: Sequence[Group], most: int, recorded: bool) -> None:
        slots = asyncio.Semaphore(most)
        await asyncio.gather(*(play(group, slots, recorded) for group in groups))
        await writer.drain()
        gc.collect()  # now that nobody waits

    writer.write(_message(""))
    while True:
        try:
            kind, content = await _received(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            os.killpg(0, signal.SIGKILL)  # the trainer's process has ended, and a rollout may hang
        if kind != "play":
            engine.answer(kind, content)
            continue
        rounds.add(task := asyncio.create_task(play_all(*content)))
        task.add_done_callback(rounds.discard)


if __name__ == "__main__":
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
