"""Code that blocks is interrupted in every thread, at its own limit; what cannot be interrupted ends the process."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import asyncio, sys, threading, time
from plumbob.rollout import Limits, ScriptedChat, ChatReply, ParsedCall, run_rollout, blocking
from plumbob.testing import hanging
blocking.UNSTOPPABLE_SECONDS = 2.0
place, fault = sys.argv[1:]

def deaf():
    print("it hangs", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

hanging.SYNC["deaf"] = (deaf, "")
script = [ChatReply("", (ParsedCall(name, {}),)) for name in ("act", "act_later")] + [ChatReply("done")]
limits = Limits() if fault == "sleep" else Limits(max_seconds=3.0, max_tool_seconds=0.5)
if fault == "sleep":
    hanging.SYNC["sleep"] = (lambda: (print("it hangs", flush=True), time.sleep(600)), "")
trace = asyncio.run(run_rollout(hanging.Case(place, fault).task(), ScriptedChat(script), None, limits=limits))
print("ended:", trace.errors[0].message, flush=True)
"""


def program(place, fault):
    command = [sys.executable, "-c", PROGRAM, place, fault]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_process():
    done = program("reward", "hangs in asyncio.to_thread")
    out, err = done.communicate(timeout=600)
    assert (done.returncode, out) == (0, "ended: stuck in `good` for 3 s\n"), err


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sync tool", "reward"])
def test_code_that_swallows_every_interruption_ends_the_process_with_a_sentence(place):
    done = program(place, "deaf")
    out, err = done.communicate(timeout=600)
    assert done.returncode == 1 and out == "it hangs\n"
    name = {"sync tool": "`act`", "reward": "`good`"}[place]
    assert err.startswith(f"Stopped: {name} has blocked the process for ") and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sync tool", "reward", "setup"])
def test_the_second_ctrl_c_of_asyncio_leaves_code_that_blocks(place):
    """asyncio's own handler waits for the event loop at the first one, and raises KeyboardInterrupt at the second."""
    done = program(place, "sleep")
    assert done.stdout.readline() == "it hangs\n"
    time.sleep(0.2)
    done.send_signal(signal.SIGINT)
    time.sleep(0.2)
    done.send_signal(signal.SIGINT)
    out, err = done.communicate(timeout=600)
    assert out == "" and "KeyboardInterrupt" in err and done.returncode != 0


TRACED = """
import sys, threading, time
from plumbob.rollout import blocking

def sleep():
    try:
        time.sleep(float(sys.argv[2]))
    except blocking.Blocked:
        pass

thread = threading.Thread(target=sleep, daemon=True)
thread.start()
time.sleep(0.1)
blocking.interrupt_thread(thread.ident)
if sys.argv[1] == "recalled":
    blocking.recall_interrupt(thread.ident)
sys.settrace(lambda *event: None)
(lambda: None)()
sys.settrace(None)
print("went on", flush=True)
"""


@pytest.mark.parametrize(("what", "seconds"), [("recalled", "0.3"), ("waiting", "60")])
def test_an_interrupt_of_one_thread_leaves_a_debugger_in_another_alone(what, seconds):
    """CPython 3.11 repeated the first instruction of a traced function for ever while the interrupt was not raised."""
    done = subprocess.run([sys.executable, "-c", TRACED, what, seconds], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


STRETCHES = """
import itertools, math, os, signal, sys, time
from plumbob.rollout import blocking
blocking.TICK = 10**6  # the kernel's timer alone
calls = []
set_timer = blocking._KernelTimer.set
blocking._KernelTimer.set = lambda timer, now, seconds: (calls.append(seconds), set_timer(timer, now, seconds))

def hang(seconds, limit):
    stretch = blocking.enter("it", limit)
    start = time.monotonic()
    try:
        time.sleep(seconds)
    except blocking.Blocked:
        return time.monotonic() - start >= limit - 0.02
    finally:
        blocking.leave(stretch)
    return None

def short(limit):
    blocking.leave(blocking.enter("it", limit))
"""
SWALLOW = """
def swallow():
    for caught in itertools.count(1):
        try:
            time.sleep(60)
        except blocking.Blocked:
            if caught == 3:
                os.write(1, b"3")
                os._exit(0)

while True:
    try:
        swallow()
    except blocking.Blocked:  # on a busy machine the next one can come while the last is still being caught
        pass
"""
"""`hang` says whether a stretch that hangs for so many seconds was interrupted no earlier than at its limit."""
CASES_OF_STRETCHES = {
    "many short ones set the timer once": (
        "for _ in range(1000): short(50)",
        "print(len(calls), hang(60, 0.2))",
        "1 True",
    ),
    "one begins while the timer runs for an earlier one": ("short(0.3)", "print(hang(60, 0.6))", "True"),
    "one has to end sooner than an earlier one would have had to": ("short(50)", "print(hang(60, 0.2))", "True"),
    "the timer's signal comes while none runs": ("short(0.1); time.sleep(0.3)", "print(hang(60, 0.2))", "True"),
    "one that ends in time is not interrupted by the earlier one's timer": (
        "short(0.2)",
        "print(hang(0.5, 50), len(calls))",
        "None 2",
    ),
    "the signal was lost": (
        "short(0.1); previous = signal.signal(blocking.SIGNAL, signal.SIG_IGN); time.sleep(0.3)",
        "signal.signal(blocking.SIGNAL, previous); print(hang(60, 0.2))",
        "True",
    ),
    "a process that was forked has a timer of its own": (
        "short(50)",
        "sys.stdout.write(str(hang(60, 0.2))) if os.fork() == 0 else os.wait()",
        "True",
    ),
    "Python ends while the timer runs": (
        "class Late:\n    def __del__(self, sleep=time.sleep, write=os.write): sleep(0.5); write(1, b'ended')",
        "sys.late = Late(); short(0.2)",
        "ended",
    ),
    "the exception is swallowed": (
        "blocking.AGAIN = 0.1; stretch = blocking.enter('it', 0.1)",
        SWALLOW,
        "3",
    ),
}


@pytest.mark.parametrize("case", CASES_OF_STRETCHES)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's timer is Linux's")
def test_every_stretch_of_the_main_thread_is_interrupted_at_its_own_limit(case):
    first, then, printed = CASES_OF_STRETCHES[case]
    done = subprocess.run(
        [sys.executable, "-c", f"{STRETCHES}\n{first}\n{then}"], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
