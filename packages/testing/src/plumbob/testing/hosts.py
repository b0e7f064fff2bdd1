"""Hosts of a small network on one machine: network namespaces with names of their own, for commands of several hosts.

    python hosts.py FOLDER PAGE

Runs the commands of a page's section "Several hosts" as they stand there, each on the host that its first comment
names: a server, and a run on two hosts, one of which is lost; then the commands with which the run goes on. Prints
what happened as one line of JSON. In place of vLLM, the server is the double of `vllm_double.py`.

Everything is inside a user namespace, so no root rights are needed, and nothing is left behind. The machine must permit
user namespaces: `why_not()` says why it does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

NAMES = ("node0", "node1", "server")
SHARED = Path("/mnt/shared")
"""The folder that all hosts see."""
INSIDE = "PLUMBOB_HOSTS_INSIDE"
"""Environment variable that is set in the user namespace."""
ENTER = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--fork", "--kill-child")


def why_not() -> str:
    """Why hosts cannot be made on this machine; empty if they can."""
    for program in ("unshare", "ip", "hostname"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    probe = "mount -t tmpfs tmpfs /run && mkdir /run/netns && ip netns add x && ip link add br0 type bridge"
    done = subprocess.run([*ENTER, "sh", "-c", probe], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"network namespaces are not permitted: {done.stderr.strip()}"


def commands_of(page: Path, section: str = "Several hosts") -> dict[str, str]:
    """First comment of each code block in a section of a Markdown page, without "# on " -> the block's command."""
    text = re.split(rf"^## {section}.*$", page.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0]
    blocks = re.findall(r"^```\n# on (.+?)\n(.+?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return {where: command.strip() for where, command in blocks}


def make_network(folder: Path) -> None:
    """Join NAMES in a network, and let them see FOLDER as SHARED. Only inside the user namespace."""
    hosts = ["127.0.0.1 localhost", *(f"10.0.0.{i} {name}" for i, name in enumerate(NAMES, 11))]
    lines = ["mount -t tmpfs tmpfs /run", "mkdir /run/netns", "ip link add br0 type bridge", "ip link set br0 up"]
    for i, name in enumerate(NAMES, 11):
        lines += [
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name eth0 netns {name}",
            f"ip link set {name} master br0 up",
            f"ip -n {name} addr add 10.0.0.{i}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ]
    lines += [f"mount --bind {folder / 'hosts'} /etc/hosts", "mount -t tmpfs tmpfs /mnt", f"mkdir {SHARED}"]
    lines += [f"mount --bind {folder / 'shared'} {SHARED}"]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    (folder / "shared").mkdir()
    subprocess.run(["sh", "-ec", "\n".join(lines)], check=True)


class Host:
    """A command that runs on one of the hosts, with its output in a file."""

    def __init__(self, name: str, command: str, log: Path, **environment: str) -> None:
        self.name, self.log = name, log
        script = f"hostname {name} && exec {command}" if "\n" not in command else f"hostname {name}\n{command}"
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-ec", script],
            env={**os.environ, **environment},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def wait(self, seconds: float) -> int:
        """The exit code. Raises AssertionError with the output if the command takes longer than `seconds`."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds} s:\n{self.said()}") from None

    def kill(self) -> None:
        """Kill all processes of the command at once, as a power cut does.

        Not by a process namespace: its processes would have other numbers than in /proc, which psutil reads, and not
        every machine permits a /proc of its own.
        """
        if self.process.poll() is None:
            first = psutil.Process(self.process.pid)
            for process in [first, *first.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def serve_double(folder: Path) -> str:
    """A folder for PYTHONPATH whose module `vllm` is the double, so that `vf-vllm` starts that one."""
    package = folder / "double" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    (package / "main.py").write_text("from plumbob.testing.hosts import serve\n\nserve()\n")
    return str(folder / "double")


def serve() -> None:
    """Be the double of `vllm serve MODEL --host HOST --port PORT ...`; prints who sends each request."""
    from aiohttp import web
    from plumbob.testing.vllm_double import Double

    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()

    @web.middleware
    async def log(request: web.Request, handler):
        print(f"{request.remote} {request.path}", flush=True)
        return await handler(request)

    app = Double().app()
    app.middlewares.append(log)
    web.run_app(app, host=given.host, port=given.port, print=lambda _: print("listening", flush=True), access_log=None)


def steps_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, host: Host, seconds: float = 900) -> None:
    """Wait until `condition()` is true. Raises AssertionError if the host's command ends before, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert host.process.poll() is None and time.monotonic() < deadline, host.said()
        time.sleep(0.1)


def play(folder: Path, page: Path) -> dict:
    """Run the page's commands, and lose the host node1 after the first saved step; the commands to resume go on to the end.

    Returns what happened.
    """
    make_network(folder)
    with ExitStack() as running:
        return _play(folder, commands_of(page), running)


def _play(folder: Path, commands: dict[str, str], running: ExitStack) -> dict:
    run = SHARED / "runs" / "first"
    counts = itertools.count()

    def host(name: str, what: str = "", **environment: str) -> Host:
        host = Host(name, commands[f"{name}{what}"], folder / f"{name}-{next(counts)}.log", **environment)
        running.callback(host.kill)
        return host

    def start(what: str) -> list[Host]:
        return [host(name, what) for name in ("node0", "node1")]

    server = host("server", PYTHONPATH=serve_double(folder), OMP_NUM_THREADS="1")
    wait_for(lambda: "listening" in server.said(), server)
    first, second = start("")
    wait_for(lambda: any((run / "checkpoints").glob("step_*")), first)
    second.kill()
    killed = {"code": first.wait(900), "steps": len(steps_of(run))}

    again = start(", to resume")
    codes = [host.wait(1800) for host in again]
    server.kill()
    asked = server.said().splitlines()
    return {
        "killed": killed,
        "codes": codes,
        "steps": [row["step"] for row in steps_of(run)],
        "versions": [row["sync/version"] for row in steps_of(run)],
        "parity": max((row["sync/parity"] for row in steps_of(run)), default=None),
        "adapters_loaded": sum("/v1/load_lora_adapter" in line for line in asked),
        "clients": sorted({line.split()[0] for line in asked if "/inference/v1/generate" in line}),
        "resumed": again[0].said()[-3000:] if any(codes) else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args()
    if INSIDE not in os.environ:
        if reason := why_not():
            sys.exit(f"hosts.py: {reason}")
        args.folder.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.execvpe(ENTER[0], [*ENTER, sys.executable, *sys.argv], {**os.environ, INSIDE: "1", "PATH": path})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(play(args.folder.absolute(), args.page.absolute())), flush=True)


if __name__ == "__main__":
    main()
