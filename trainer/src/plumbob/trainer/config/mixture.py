"""Several environments in one run: their names, weights and settings. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.trainer.config.options import require

if TYPE_CHECKING:
    from plumbob.trainer.config.train import TrainConfig

LARGEST_WEIGHT = 1000
"""Largest weight of an environment."""


def parse(written: str) -> tuple[str, int]:
    """An environment as it is named in a run of several: (name, weight). Example: parse("gsm8k:2") == ("gsm8k", 2)."""
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


def check(config: TrainConfig) -> None:
    """Raise UserError for what a run of several environments cannot have. Nothing is checked for a run of one."""
    if not config.mixture:
        return
    names = [name for name, _ in config.members]
    require(len(set(names)) == len(names), f"an environment is named twice: {' '.join(names)}; name each one once")
    require(config.env == names[0], f"env is {config.env}, but the first environment of mixture is {names[0]}")
    for option, value in (("--datasets", config.datasets), ("--eval-datasets", config.eval_datasets)):
        key = option[2:].replace("-", "_")
        require(value is None, f"{option} is for one environment; with several, give -a ENV.{key}=... instead")
    require(config.max_steps != -1, "--num-epochs is for one environment; with several, give --max-steps")
    for pair in config.env_args:
        owner, dot, _ = pair.partition("=")[0].partition(".")
        require(not dot or owner in names, f"-a {pair} is for {owner!r}, which is not an environment of this run")


def for_each(config: TrainConfig) -> list[TrainConfig]:
    """The settings of each environment, as those of a run of that environment alone."""
    if not config.mixture:
        return [config]
    result = []
    for name, _ in config.members:
        own = config.settings_of(name)
        data = {key: own.pop(key, None) for key in ("datasets", "eval_datasets")}
        pairs = tuple(f"{key}={value}" for key, value in own.items())
        # What judges the whole run is checked for the whole run.
        alone = {"mixture": (), "keep_best": None, "stop_when_flat": None}
        result.append(dataclasses.replace(config, env=name, env_args=pairs, **data, **alone))
    return result


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
