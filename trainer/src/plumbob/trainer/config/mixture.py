"""Several environments in one run: their names, weights and settings. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plumbob.console import UserError
from plumbob.trainer.config.options import require

LARGEST_WEIGHT = 1000
"""Largest weight of an environment."""


def parse(written: str) -> tuple[str, int]:
    """An environment as it is named in a run of several: (name, weight). Example: parse("gsm8k:2") == ("gsm8k", 2)."""
    require("," not in written, f"several environments are separated by spaces: {' '.join(written.split(','))}")
    name, colon, weight = written.partition(":")
    right = not colon or (weight.isdecimal() and 1 <= int(weight) <= LARGEST_WEIGHT)
    require(
        bool(name) and right,
        f"the weight of an environment is a whole number from 1 to {LARGEST_WEIGHT}, as in gsm8k:2, not {written!r}",
    )
    return name, int(weight) if colon else 1


def common_and_own(env_args: Sequence[str], env: str) -> tuple[dict[str, str], dict[str, str]]:
    """(settings of every environment, settings of `env` alone) among pairs key=value and ENV.key=value: name -> text."""
    pairs = [pair.split("=", 1) for pair in env_args]
    common = {key: value for key, value in pairs if "." not in key}
    return common, {key.removeprefix(f"{env}."): value for key, value in pairs if key.startswith(f"{env}.")}


def owner_of(option: str, known: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """(environment, name of its setting) that an option of a run with several environments means.

    `option`: "noise" or "musique.noise". `known`: environment -> names of its settings. Raises UserError for a name that
    several environments have. A name that none has belongs to the first one, which will refuse it.
    """
    owner, dot, name = option.partition(".")
    if dot and owner in known:
        return owner, name
    owners = [env for env, names in known.items() if option.replace("-", "_") in names]
    if len(owners) > 1:
        written = " or ".join(f"--{env}.{option}" for env in owners)
        raise UserError(f"--{option} is a setting of {' and '.join(owners)}; write {written}")
    return (owners or list(known))[0], option
