"""Errors of the operating system as one sentence."""

from __future__ import annotations

import errno
import os

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "choose a place that you may read and write",
    errno.EPERM: "choose a place that you may read and write",
    errno.EROFS: "choose a place that can be written",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def told(error: OSError) -> str:
    """Return an error of the operating system as a part of a sentence: what, where, and what to do.

    Example: "No space left on device (/tmp/x); free some space".
    """
    where = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    advice = f"; {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
    return f"{error.strerror or error}{where}{advice}"
