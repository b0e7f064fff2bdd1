"""Records beside the reference: those of TRL's steps while they are made, and those of any trainer later from their files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from plumbob.doctor import record as records
from plumbob.doctor import stages
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.confirm import trial_of
from plumbob.doctor.examine import Examination, Source, merged, of_outcomes
from plumbob.doctor.findings import Finding
from plumbob.doctor.format import files_of, read_right
from plumbob.doctor.trends import Plan, Trends, judge
from plumbob.doctor.trl.settings import STAGES
from plumbob.doctor.trl.words import REMEDIES
from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, with_config

COURSE = "run.json"
"""File in the folder of records that says what no record does."""
WITHOUT_ADAPTER = (stages.gradient, stages.reference_policy, stages.trained_tensors)
"""Stages that put the adapter on themselves, or compare with the model without it."""
NOT_ENDED = "The training has not ended, or was ended from outside."
DEAD = 0.9
"""Share of groups without a signal, on average, below which a run of TRL is not said to have too little, or no success."""
MOST_RECORDS = 12
"""Most records of a run that are compared with the reference."""


@with_config(ConfigDict(ser_json_inf_nan="constants"))
@dataclass
class Reading:
    """What the records of a run say."""

    left_out: list[str] = field(default_factory=list)
    """Names of stages that these settings leave out."""
    limits: list[str] = field(default_factory=list)
    found: dict[Source, list[Finding]] = field(default_factory=lambda: {"environment": [], "records": []})
    """What data, rewards, settings and the trainer show without a record, and what records do."""
    trends: Annotated[
        Trends,
        PlainSerializer(lambda t: {"plan": t.plan, "patience": t.patience, "steps": t.numbers.rows}),
        PlainValidator(lambda t: judge(t["steps"], Plan(**t["plan"]), patience=t["patience"])),
    ] = field(default_factory=lambda: Trends(Plan()))
    examined: int = 0
    ended: bool = False
    of_trl: bool = True
    """Whether TRL made the records; else a trainer of the user's own."""
    script: list[str] = field(default_factory=list)
    """The script of the run, and its arguments; empty if it was started otherwise."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the GRPOConfig that a remedy may change."""
    places: dict[str, str] = field(default_factory=dict)
    """Stage -> where the user's own code of it is, as "file.py:12 Class.function"."""
    folder: Path = Path()

    def add(
        self,
        record: records.StepRecord,
        plain: Any,
        tokenizer: Any,
        live: Any = None,
        previous: records.StepRecord | None = None,
    ) -> list[Finding]:
        """Compare a record with the reference; returns failures of checks that did not fail before."""
        if previous is not None and previous.step != record.step - 1:
            previous = None
        x = stages.Examined(record, plain, tokenizer, live, previous=previous)
        outcomes: list[stages.Outcome] = []
        for stage in STAGES if self.of_trl else stages.STAGES:
            if stage.__name__ in self.left_out:
                continue
            outcome = self._outcome(stage, x)
            outcomes.append(outcome)
            if outcome.verdict == "fail":
                break  # later stages are given what this one made
        self.examined += 1
        return self.add_findings(of_outcomes(outcomes, record.step + 1), "records")

    def _outcome(self, stage: Any, x: stages.Examined) -> stages.Outcome:
        adapter = x.live.tensors() if x.record.settings.adapter and x.live and stage not in WITHOUT_ADAPTER else {}
        with x.plain.having(adapter) if x.plain and adapter else contextlib.nullcontext():
            result = stage(x)
            if result.verdict == "fail" and stage is stages.slopes and self.places.get("loss"):
                others = (stage(dataclasses.replace(x, record=record)) for record in as_other_losses(x.record))
                result = next((one for one in others if one.verdict == "pass"), result)
        unexplained = result.cause == "engine-trainer-mismatch" and not result.what
        if unexplained and stage is stages.trainer_logprobs and x.live:
            rows = [(r.token_ids.tolist(), r.loss_mask.tolist()) for r in (x.record.rows[i] for i in x.drawn[:6])]
            if x.live.pads_wrongly(rows, result.limit):
                result.cause, result.what = "attention-or-positions-wrong", "padding that changes what a row computes"
        return result

    def add_findings(self, found: Iterable[Finding], source: Source = "environment") -> list[Finding]:
        """Take in findings; returns failures of checks that did not fail before."""
        placed = [
            dataclasses.replace(f, place=f.place or self.places.get(f.stage or "", "")) if f.cause else f for f in found
        ]
        known = {f.check for f in self.found[source] if f.cause}
        self.found[source] += placed
        return [f for f in placed if f.cause and f.check not in known]

    def add_row(self, row: Mapping[str, float]) -> list[Finding]:
        """Take in the numbers of a step; returns what they refute for the first time."""
        return [finding for finding in self._weighed(self.trends.add(row)) if finding.cause]

    def _weighed(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Findings of the course of the run. Runs of TRL are often small: where some groups differ, they are a signal."""
        dead = [row.get("groups/zero_signal_share", 0.0) for row in self.trends.numbers.start] or [0.0]
        for one in findings:
            few = one.cause in ("too-little-signal", "never-succeeds") and self.of_trl and np.mean(dead) < DEAD
            yield dataclasses.replace(one, verdict="pass", cause=None) if few else one

    def broken(self, why: str) -> None:
        """A record could not be compared."""
        self.found["records"].append(Finding("a recorded step can be computed again", "error", why, None, "logprobs"))

    def examination(self) -> Examination:
        x = Examination("the script", "the model", remedies=REMEDIES if self.of_trl else {})
        own, others, chance = merged(self.found["environment"]), "rewards-of-other-rollouts", "reward-nondeterministic"
        if any(f.cause == others for f in own):  # which is known of rewards that are the same in the same order
            own = [dataclasses.replace(f, cause=others) if f.cause == chance else f for f in own]
        # What a text earns among others says nothing of it, if the others decide.
        x.add("environment", *sorted(own, key=lambda f: f.cause not in (others, chance)))
        x.add("records", *merged(self.found["records"]))
        if rows := self.trends.numbers.rows:
            x.add("trends", *self._weighed(self.trends.findings()))
            said = self.trends.progress()
            x.notes += [f"{said[0].upper()}{said[1:]}."] if len(rows) > 1 else []
        x.limits += self.limits
        if self.script and isinstance(tried := trial_of(x, self.options), tuple):
            again = f"python -m plumbob.doctor {self.folder} --confirm"
            x.notes.append(f"To try {tried[1]} {tried[2]} beside the run as it is, with several seeds:  {again}")
        if not self.of_trl and x.causes:
            x.limits.append("What to do is said in the options of plumbob's own trainer, where it needs one.")
        return x

    def as_json(self) -> bytes:
        """What no record says, for `of_folder`."""
        once = dataclasses.replace(self, found={source: merged(found) for source, found in self.found.items()})
        return KEPT.dump_json(once, indent=1)


def as_other_losses(record: records.StepRecord) -> Iterator[records.StepRecord]:
    """The record with what else is right of a loss that a user has written: another reduction of `loss_type`, and, where each
    completion is trained once, no ratio to the policy that sampled it.
    """
    settings = record.settings
    for reduction in ("rows", "constant", "step_tokens", None):
        copy_ = dataclasses.replace(record, updates=copy.deepcopy(record.updates))
        for update in copy_.updates:
            size, tokens = len(update.members), sum(len(one.weights) for one in update.trained)
            for one in [*update.trained, update.trial]:
                if one is not None and reduction:
                    rows = np.bincount(one.rows)[one.rows] if one is update.trial else len(one.weights)
                    counts = {"rows": rows * size, "constant": size * settings.max_tokens, "step_tokens": tokens}
                    one.weights = np.ones(len(one.weights)) / counts[reduction]
        yield copy_
        if settings.num_minibatches * settings.num_iterations == 1:
            for trial in [update.trial for update in copy_.updates if update.trial is not None]:
                trial.old_logprobs = trial.logprobs
            yield copy_


KEPT = TypeAdapter(Reading)


def of_folder(folder: Path) -> Reading:
    """What the records in a folder or file say. Raises ValueError if there are none, or if one is not as documented."""
    from plumbob.doctor.reference.model import load
    from plumbob.doctor.reference.rows import load_tokenizer

    files = files_of(folder)
    found = [*files, *folder.glob(COURSE), *folder.glob(f"*/{COURSE}")]
    if not found:
        raise ValueError(f"{folder} has no records of training steps")
    try:
        reading, previous = KEPT.validate_json((found[0].parent / COURSE).read_bytes()), None
    except (OSError, ValueError):  # there is none, or one of an earlier version
        reading, previous = Reading(), None
    reading.folder = found[0].parent
    if not reading.ended:
        reading.limits.append(NOT_ENDED)
    if reading.ended or reading.examined:  # with the weights of the run itself, which no record has
        return reading
    for where, record in itertools.islice(read_right(folder), MOST_RECORDS):
        reading.of_trl = record.trainer.startswith("trl ")
        plain = tokenizer = None
        try:
            plain = load(record.settings) if record.step == 0 else None
            tokenizer = load_tokenizer(record.settings)
        except (OSError, ValueError) as error:
            reading.limits.append(f"The model was not loaded: {str(error).splitlines()[0]}")
        try:
            reading.add(record, plain, tokenizer, None, previous)
        except Exception as error:
            reading.broken(f"{where}: {type(error).__name__}: {error}")
        previous = record
    if not reading.of_trl:
        reading.limits = [one for one in reading.limits if one != NOT_ENDED]
    reading.limits = list(dict.fromkeys(reading.limits))
    return reading


def finding_text(x: Examination, finding: Finding) -> str:
    """A failure in one paragraph."""
    cause = CAUSES[finding.cause or ""]
    step = f" in step {finding.step}" if finding.step else ""
    return f"{cause.id}{step}: expected: {finding.check}; found: {finding.evidence}. To do: {x.advice(cause)}"
