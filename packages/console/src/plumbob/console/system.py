"""Errors of the operating system as one sentence, and output that nobody takes any more."""

from __future__ import annotations

import errno
import os
import select
import sys

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "choose a place that you may read and write",
    errno.EPERM: "choose a place that you may read and write",
    errno.EROFS: "choose a place that can be written",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
"""What its user can do about an error of the operating system."""


def told(error: OSError) -> str:
    """Return an error of the operating system as a part of a sentence: what, where, and what to do.

    Example: "No space left on device (/tmp/x); free some space".
    """
    where = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
    return f"{error.strerror or error}{where}{advice}"


def output_is_lost() -> bool:
    """Whether stdout cannot be written. Then what it still holds is dropped: Python would try again, and fail, at its end."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # not a file, as in a test or a notebook, or closed
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    lost = any(event & select.POLLERR for _, event in poll.poll(0))  # a pipe that nobody reads
    try:
        sys.stdout.flush()
    except OSError:
        lost = True
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return lost
