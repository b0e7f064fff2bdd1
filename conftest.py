"""For all tests: examples of property tests, Ctrl-C, the width of the terminal.

Property tests have the same examples on every machine, and an example may take as long as the machine needs.

HYPOTHESIS_PROFILE=random draws new examples, as CI does; a failure then prints how to repeat it.
"""

import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# A shell without job control starts background jobs with Ctrl-C ignored, and so would be every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is as for a pipe, whatever the width of the terminal that pytest-xdist tells its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)
