"""`vf-vllm`: the command it becomes, and servers that a run starts for itself."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from plumbob.console import UserError
from plumbob.trainer.inference.vllm import vf_vllm as serve
from plumbob.trainer.inference.vllm.launch import ServerOptions, free_port, server_rank, start_server

USERS = (
    "--model Qwen/Qwen2.5-7B-Instruct --port 8000 --dtype bfloat16 --gpu-memory-utilization 0.9 --max-model-len 8192 "
    "--enforce-eager --tensor-parallel-size 1 --enable-auto-tool-choice --tool-call-parser hermes"
)
"""As the users of other trainers write it."""

STAND_IN = """
import http.server, sys, time
argv = sys.argv[1:]
value = lambda flag, default: argv[argv.index(flag) + 1] if flag in argv else default
print("starting", argv, flush=True)
if reason := value("--fail", ""):
    sys.exit(reason)
time.sleep(float(value("--start-seconds", "0")))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(value("--port", ""))), Health).serve_forever()
"""
"""In place of `vf-vllm`, whose start takes a minute: shows what it was given, and answers /health or ends."""
PROGRAM = (sys.executable, "-c", STAND_IN)


def planned(text, environ=None, known=None):
    return serve.plan(shlex.split(text), environ or {}, known)


def test_the_users_command():
    launch = planned(USERS)
    assert launch.argv[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    assert launch.argv[4] == "Qwen/Qwen2.5-7B-Instruct"
    assert shlex.join(launch.argv).endswith(USERS.split(maxsplit=2)[2])  # verbatim, in order
    added = launch.argv[5 : -len(shlex.split(USERS)) + 2]
    assert added == shlex.split(
        "--host 127.0.0.1 --logprobs-mode processed_logprobs --generation-config vllm --enable-prefix-caching "
        "--worker-extension-cls plumbob.trainer.inference.vllm.worker.WorkerExtension --enable-scale-out "
        "--disable-uvicorn-access-log --enable-lora --max-loras 2"
    )
    assert launch.environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    assert launch.warnings == ()


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        ("--max-loras 8", "--max-loras 2"),
        ("--max_loras=8", "--max-loras 2"),
        ("--no-enable-prefix-caching", " --enable-prefix-caching"),
        ("--logprobs-mode raw_logprobs", "processed_logprobs"),
        ("--host 127.0.0.2", "127.0.0.1"),
        ("--generation-config auto", "--generation-config vllm"),
        ("--generation_config=some/folder", "--generation-config vllm"),
    ],
)
def test_what_the_user_gives_is_not_given_twice(given, absent):
    command = shlex.join(planned(f"--model m {given}").argv)
    assert given in command and absent not in command


def test_each_way_of_syncing():
    nccl, ipc, disk = (planned(f"--model m --sync {way}") for way in ("nccl", "ipc", "disk"))
    assert '{"backend": "nccl"}' in nccl.argv and '{"backend": "ipc"}' in ipc.argv
    assert "--weight-transfer-config" not in disk.argv
    assert not any("--enable-lora" in launch.argv for launch in (nccl, ipc, disk))
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" in ipc.environment
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in nccl.environment
    with pytest.raises(UserError, match="--sync mail is not valid; the choices are lora, nccl, ipc, disk"):
        planned("--model m --sync mail")


def test_older_servers_are_not_given_options_that_they_do_not_know():
    old = planned("--model m", known="disable_uvicorn_access_log: bool = False")
    assert "--enable-scale-out" not in old.argv and "--disable-uvicorn-access-log" in old.argv


def test_models_by_name_place_and_position():
    tiny = planned("--model=tiny")
    assert Path(tiny.argv[4], "config.json").is_file() and "--served-model-name tiny" in shlex.join(tiny.argv)
    assert planned("-m some/folder").argv[4] == planned("some/folder").argv[4] == "some/folder"
    with pytest.raises(UserError, match="--model is missing"):
        planned("--port 8000")
    with pytest.raises(UserError, match="--model needs a value"):
        planned("--port 8000 --model")


def test_several_copies_answer_through_one_process():
    assert "--api-server-count 1" in shlex.join(planned("--model m --data-parallel-size 2").argv)
    assert "--api-server-count" not in planned("--model m --data-parallel-size 1").argv
    assert "two" in planned("--model m --data-parallel-size two").argv  # vLLM says that it is no number


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.3", "::", "gpu-7"])
def test_other_machines_are_let_in_only_when_asked_for(host):
    with pytest.raises(UserError, match=f"with --host {host}, other machines could replace"):
        planned(f"--model m --host {host}")
    exposed = planned(f"--model m --host {host} --expose-dev-endpoints")
    assert "can replace the server's weights" in exposed.warnings[0]
    assert "VLLM_SERVER_DEV_MODE" in exposed.environment and "--expose-dev-endpoints" not in exposed.argv
    closed = planned(f"--model m --host {host} --no-dev-endpoints")
    assert closed.warnings == () and set(closed.environment) == {"VLLM_USE_FLASHINFER_SAMPLER"}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.3.3", "::1"])
def test_this_machine_s_own_addresses(host):
    assert planned(f"--model m --host {host}").warnings == ()


def command(*arguments, **environ):
    """The installed command's module as a program."""
    return subprocess.run(
        [sys.executable, "-m", "plumbob.trainer.inference.vllm.vf_vllm", *arguments],
        capture_output=True, text=True, timeout=600, env={**os.environ, **environ},
    )  # fmt: skip


def test_the_program():
    shown = command("--print-command", "--model", "tiny", "--host", "0.0.0.0", "--expose-dev-endpoints")
    assert shown.returncode == 0 and " serve " in shown.stdout and "warning" in shown.stderr
    wrong = command("--port", "8000")
    assert (wrong.returncode, wrong.stdout) == (2, "") and wrong.stderr.startswith("vf-vllm: --model is missing")
    if serve.installed_options() is None:
        missing = command("--model", "tiny")
        assert (
            missing.returncode == 2
            and "vLLM is not installed; install it with `uv sync --extra vllm`" in missing.stderr
        )


def test_help_loads_nothing_heavy():
    assert "--expose-dev-endpoints" in command("--help").stdout
    code = "import sys, plumbob.trainer.inference.vllm.vf_vllm as s; s.plan(['-m', 'tiny'], {}); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "vllm", "verifiers", "transformers"} & set(eval(modules))


# --- servers of a run -------------------------------------------------------------------------------------------------


def test_a_server_starts_answers_and_ends(tmp_path):
    told = []
    handle = start_server(
        ServerOptions("tiny", lora_rank=12, max_length=512, sleep=True, extra=("--start-seconds", "1.2")),
        tmp_path / "logs" / "vllm.log",
        program=PROGRAM,
        status=told.append,
    )
    try:
        assert told and "starting vLLM at" in told[0]
        assert urlopen(f"{handle.url}/health").status == 200
        started = handle.log.read_text()
        for part in ("'--max-lora-rank', '16'", "'--max-model-len', '512'", "sleep"):
            assert part in started
    finally:
        handle.close()
    assert handle.process.poll() is not None
    handle.close()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("OSError: [Errno 98] Address already in use", "its port is in use"),
        ("ValueError: Free memory on device cuda:0 (3.1/139 GiB) is less than", "too little GPU memory"),
        ("ModuleNotFoundError: No module named 'x'", "the end of"),
    ],
)
def test_a_server_that_does_not_start_shows_why(tmp_path, reason, message):
    with pytest.raises(UserError, match=message) as error:
        start_server(ServerOptions("tiny", extra=("--fail", reason)), tmp_path / "log", program=PROGRAM)
    assert reason in str(error.value)


def test_a_server_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(UserError, match="did not answer within 0.5 s"):
        start_server(
            ServerOptions("tiny", extra=("--start-seconds", "60")), tmp_path / "log", program=PROGRAM, timeout=0.5
        )


def test_a_server_ends_with_its_trainer(tmp_path):
    """Also with one that is killed: the kernel tells the server, which has become vLLM by then."""
    code = (
        "import os, sys, time\n"
        "from plumbob.trainer.inference.vllm import vf_vllm\n"
        "vf_vllm.die_with_parent(int(os.environ[vf_vllm.PARENT]))\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c",
         "import os, subprocess, sys, time\n"
         "env = {**os.environ, 'PLUMBOB_PARENT_PID': str(os.getpid())}\n"
         f"child = subprocess.Popen([sys.executable, '-c', {code!r}], env=env)\n"
         "print(child.pid, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    child = int(trainer.stdout.readline())
    time.sleep(1.0)  # it becomes another program
    os.kill(child, 0)
    trainer.kill()
    trainer.wait()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the server outlived its trainer")


def test_ports_and_ranks():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", free_port()))
    assert [server_rank(r) for r in (1, 8, 9, 16, 64, 300)] == [8, 8, 16, 16, 64, 320]
    with pytest.raises(UserError, match="up to rank 512"):
        server_rank(600)
