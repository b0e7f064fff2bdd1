"""For all tests: examples of property tests, Ctrl-C, the width of the terminal, imports and garbage collections.

Property tests have the same examples on every machine, and an example may take as long as the machine needs.

HYPOTHESIS_PROFILE=random draws new examples, as CI does; a failure then prints how to repeat it. In the same way --draw WORD
draws half of the tests marked `slow`, and of each of them one case: which ones depends on WORD, a commit for example, and on
nothing else.
"""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from random import Random

import pytest
import typer
from hypothesis import settings
from plumbob.console.app import run_app
from plumbob.rollout.verifiers_import import put_off_clients

EXAMPLES = 25
"""Examples of a property test that does not say how many. CI draws new ones each time, so that they add up."""

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=EXAMPLES)
settings.register_profile("random", deadline=None, print_blob=True, max_examples=EXAMPLES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# As the commands do before they import verifiers.
put_off_clients()

# A million objects of torch, verifiers and the tests stay in memory. Python looks through all of them after 70,000 new
# ones; here it does so a hundredth as often, and when a run asks for it.
gc.set_threshold(700, 10, 1000)

# A shell without job control starts background jobs with Ctrl-C ignored, and so would be every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Of `uv run pytest`; commands that a test starts would tell their user to write `uv run` too.
os.environ.pop("UV_RUN_RECURSION_DEPTH", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", metavar="WORD", help="run half of the slow tests, one case of each; WORD decides which")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    word = config.getoption("--draw")
    if word is None:
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    # A seed that is a text gives the same numbers in every process, as pytest-xdist's workers need.
    tests = Random(word).sample(sorted(cases), (len(cases) + 1) // 2)
    drawn = {Random(f"{word} {name}").choice(cases[name]).nodeid for name in tests}
    left_out = {item: None for of_test in cases.values() for item in of_test if item.nodeid not in drawn}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as for a pipe, whatever the width of the terminal that pytest-xdist tells its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command, given its name, its app and its arguments, in this process; returns its exit code, stdout and stderr."""

    def run(name: str, app: typer.Typer, *args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_app(name, app, [str(arg) for arg in args])
        return int(exit_.value.code or 0), *capsys.readouterr()

    return run
