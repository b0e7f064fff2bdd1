"""For all tests: examples of property tests, Ctrl-C, the width of the terminal, imports and garbage collections.

Property tests have the same examples on every machine, and an example may take as long as the machine needs.

HYPOTHESIS_PROFILE=random draws new examples, as CI does; a failure then prints how to repeat it.
"""

import gc
import os
import signal

import pytest
from hypothesis import settings
from plumbob.rollout.verifiers_import import put_off_clients

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# As the commands do before they import verifiers.
put_off_clients()

# A million objects of torch, verifiers and the tests stay in memory. Python looks through all of them after 70,000 new
# ones; here it does so a hundredth as often, and when a run asks for it.
gc.set_threshold(700, 10, 1000)

# A shell without job control starts background jobs with Ctrl-C ignored, and so would be every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as for a pipe, whatever the width of the terminal that pytest-xdist tells its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)
