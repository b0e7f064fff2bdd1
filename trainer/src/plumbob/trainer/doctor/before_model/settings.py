"""What the settings and the model's files say by themselves. Imports neither torch nor verifiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.watch.history import Outcome
from plumbob.trainer.watch.settings_rules import (
    ADAPTER,
    HAS_DIRECTION,
    REACHES_PEAK,
    adapter_scale,
    kept_checkpoint,
    kl_estimator,
    warm_up,
)

PENALTIES = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
}
"""Settings of a generation config that depend on what the text already has, with the value that changes nothing."""
OTHERS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0}
"""Other settings of a generation config that change what is sampled."""

BY_SETTINGS: dict[str, Callable[[TrainConfig], Outcome]] = {
    HAS_DIRECTION: kl_estimator,
    REACHES_PEAK: warm_up,
    ADAPTER: adapter_scale,
    "the final model is chosen by what it earns": kept_checkpoint,
}
"""Check -> rule, of the rules that the watch has as well."""


def checks(config: TrainConfig) -> Iterator[Finding]:
    yield _groups(config)
    yield _sampling(config)
    for check, rule in BY_SETTINGS.items():
        if (outcome := rule(config)) is not None:
            yield Finding.of(check, outcome)


def _groups(config: TrainConfig) -> Finding:
    """How many groups a step has at most. How many of them have a signal is known once rollouts are sampled."""
    rollouts, size = config.rollouts_per_step(1), config.num_generations
    groups = rollouts // size
    evidence = f"a step has {groups} groups of {size} rollouts"
    few = groups < thresholds.LIVE_GROUPS and rollouts < thresholds.LIVE_ROLLOUTS
    if few:
        evidence += f"; at least {float(thresholds.LIVE_GROUPS):g} groups with a signal are needed"
    cause = "too-little-signal" if few else None
    return Finding("a step has enough groups", "fail" if few else "pass", evidence, cause)


def _sampling(config: TrainConfig) -> Finding:
    """Does the model's generation_config.json change what is sampled? Engines here are told every setting."""
    check = "nothing but the run's own settings changes what is sampled"
    found = {name: value for name, value in _generation_config(config.model).items() if name in {**PENALTIES, **OTHERS}}
    active = {name: v for name, v in found.items() if v is not None and v != {**PENALTIES, **OTHERS}[name]}
    evidence = f"--temperature {config.temperature:g}, --top-p {config.top_p:g}, --top-k {config.top_k}"
    if active:
        listed = ", ".join(f"{name} {value:g}" for name, value in active.items())
        evidence += f"; the model's generation_config.json asks for {listed}, which rollouts do not use"
    stated = _stated() if config.engine == "vllm" else {}
    wrong = {name: stated[name] for name in PENALTIES if name in stated and stated[name] != PENALTIES[name]}
    if wrong:
        evidence += f"; requests to the server ask for {wrong}"
        return Finding(check, "fail", evidence, "sampling-penalised")
    return Finding(check, "pass", evidence)


def _stated() -> dict[str, Any]:
    """What every request to a vLLM server states, so that the server's own defaults have no effect."""
    from plumbob.trainer.inference.generate_api import STATED

    return STATED


def _generation_config(model: str) -> dict[str, Any]:
    """The model's generation_config.json, if it is on this disk."""
    with suppress(OSError, ValueError):
        found = json.loads((Path(model_path(model)) / "generation_config.json").read_text())
        return {name: v for name, v in found.items() if v is None or isinstance(v, int | float)}
    return {}
