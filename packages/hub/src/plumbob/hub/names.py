"""Names of environments ("gsm8k") and of the distributions that hold them ("vf-gsm8k")."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Name prefixes that only the hub's index may provide: environments, and the libraries that environments share. If a
# public index offers such a name, it is name squatting or a mistake.
FIRST_PARTY = ("vf-", "plumbob-")


def normalise(name: str) -> str:
    """Return a distribution's name in the normal form of package indexes (PEP 503).

    Example: "VF_gsm8k" -> "vf-gsm8k".
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def environment_name(name: str) -> str:
    """Return an environment's short name, from its short name or its distribution's name.

    Example: "vf_gsm8k" -> "gsm8k".
    """
    return normalise(name).removeprefix("vf-")


def distribution_names(name: str) -> list[str]:
    """Return the distributions that may hold an environment, most likely first.

    Example: "gsm8k" -> ["vf-gsm8k", "gsm8k"].
    """
    exact = normalise(name)
    return [exact] if exact.startswith("vf-") else [f"vf-{exact}", exact]


def is_first_party(distribution: str) -> bool:
    """Whether only the hub's index may provide this distribution: its name starts with `vf-` or `plumbob-`."""
    return normalise(distribution).startswith(FIRST_PARTY)


def own_packages(distribution: str) -> tuple[str, ...]:
    """Return the paths in a wheel, below which a distribution's own code is.

    Example: "vf-gsm8k" -> ("vf_gsm8k",); "plumbob-hub" -> ("plumbob_hub", "plumbob/hub").
    """
    module = normalise(distribution).replace("-", "_")
    prefix, _, rest = module.partition("_")
    return (module, f"plumbob/{rest}") if prefix == "plumbob" and rest else (module,)


def near(name: str, names: Iterable[str]) -> str | None:
    """Return the entry of `names` most similar to an unknown name, for "did you mean"; None if none is similar."""
    import difflib  # importing difflib takes 0.01 s, which `hub list` does not need

    by_short = {environment_name(known): known for known in names}
    close = difflib.get_close_matches(environment_name(name), by_short, n=1)
    return by_short[close[0]] if close else None
