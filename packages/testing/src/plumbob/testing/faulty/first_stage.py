"""What `plumbob.doctor` says of the first two training steps of a run in this process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import typer
from plumbob.doctor import stages
from plumbob.doctor.findings import STAGES, Stage
from plumbob.doctor.reference.model import load
from plumbob.doctor.reference.rows import load_tokenizer
from plumbob.testing.faulty.fault import BASE
from plumbob.trainer.cli import train as command
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor.live import load_subject, record_steps

RECORDED: tuple[Stage, ...] = STAGES[STAGES.index("rows") : STAGES.index("signal")]
"""Stages of a training step, which its record shows. Those before are the environment's, those after it a whole run's."""
SMALL = "--batch-size 32 --gradient-accumulation-steps 1"
"""Size of the steps of a run whose row says nothing of it."""


def config_of(env: str, options: str, seed: int = 0) -> TrainConfig:
    """The settings of `train ENV` with the options of `BASE` and these."""
    size = "" if "--batch-size" in options else SMALL
    words = f"{env} {BASE[env]} {size} --eval-examples 0 --seed {seed} {options}".split()
    given = dict(typer.main.get_command(command.app).make_context("train", words).params)
    return command.configure(given)[0]


def first_stage(config: TrainConfig) -> stages.Outcome | None:
    """What the first stage that differs says of two recorded steps of a run with these settings; None if none differs."""
    with tempfile.TemporaryDirectory() as folder:
        subject = load_subject(config, join_world(torch.device("cpu")), Path(folder), lambda _: None)
        try:
            kept = record_steps(subject, 2)
            settings = kept.records[0].settings
            plain, tokenizer, before = load(settings), load_tokenizer(settings), None
            for record, weights in zip(kept.records, kept.weights, strict=False):
                live = kept.live if before is None else None
                with plain.having(weights):
                    x = stages.Examined(record, plain, tokenizer, live, seed=config.seed, previous=before)
                    found = stages.first(stages.examine(x))
                if found is not None:
                    return found
                before = record
            return None
        finally:
            subject.close()
