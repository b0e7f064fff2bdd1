"""The names of environments: "gsm8k" and its distribution "vf-gsm8k"."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Names that only the hub's index may provide: environments, and the libraries that they share. A public index that
# offers one of them is either a squatter or a mistake.
FIRST_PARTY = ("vf-", "plumbob-")


def normalise(name: str) -> str:
    """A distribution's name as indexes spell it (PEP 503). Example: "VF_gsm8k" -> "vf-gsm8k"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def environment_name(name: str) -> str:
    """Any of an environment's names without its prefix. Example: "vf_gsm8k" -> "gsm8k"."""
    return normalise(name).removeprefix("vf-")


def distribution_names(name: str) -> list[str]:
    """The distributions that may hold an environment, likeliest first. Example: "gsm8k" -> ["vf-gsm8k", "gsm8k"]."""
    exact = normalise(name)
    return [exact] if exact.startswith("vf-") else [f"vf-{exact}", exact]


def is_first_party(distribution: str) -> bool:
    return normalise(distribution).startswith(FIRST_PARTY)


def near(name: str, names: Iterable[str]) -> str | None:
    """The nearest of `names` to a name that is none of them, for a "did you mean"."""
    import difflib  # a hundredth of a second that `hub list` does not need

    by_short = {environment_name(known): known for known in names}
    close = difflib.get_close_matches(environment_name(name), by_short, n=1)
    return by_short[close[0]] if close else None
