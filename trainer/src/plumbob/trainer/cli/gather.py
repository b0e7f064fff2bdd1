"""What `doctor` examines, and in which order: an environment before its training, or a run directory.

Environments are played without a model; then a run is set up, takes a few training steps as `train` does, and their records
are compared with the reference. Of a run directory, metrics and stored records come first.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from plumbob.console import UserError, first_line
from plumbob.console.working import note
from plumbob.doctor import trends
from plumbob.doctor.causes import is_symptom
from plumbob.doctor.examine import Examination, merged, of_outcomes
from plumbob.doctor.findings import Finding
from plumbob.trainer.cli.loading import (
    fast_imports,
    import_transformers,
    import_verifiers,
)
from plumbob.trainer.config.chat_template import TemplateChoice
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import is_in_use, lines_lost, read_metrics
from plumbob.trainer.watch.warnings import course_of, plan_of, settings_checks, stop_finding

STEPS, RECORDED = 3, 2
"""Number of training steps that `doctor ENV` takes, and how many of them are recorded and compared with the reference."""
NEVER = 0.5
"""Largest reward of a step that counts as a failure, where all rollouts of each group earn the same."""
MOST_RECORDS = 8
"""Most stored records of a run that are compared."""
Status = Callable[[str], None]


def of_environment(config: TrainConfig, status: Status, *, everything: bool, model: bool) -> Examination:
    """The examination before a run. `everything`: also what comes after the first cause. `model`: whether it may be loaded.

    Raises UserError if the environment, or the model, cannot be loaded.
    """
    x = Examination(config.env, config.model)
    x.add("settings", *settings_checks(config))
    environments = _play(x, config)
    for tasks in environments[:1]:
        _read_template(x, config, tasks)
    if not model:
        x.limits.append("The model was not loaded: prompts, log-probabilities, losses and updates were not examined.")
    elif x.names_reason and not everything:
        x.limits.append("The checks that load the model were not run after this failure; --all runs them too.")
    else:
        _with_model(x, config, environments, status, judged=True)
    x.limits.append(
        "What happens in later steps, such as a policy that exploits the reward, collapses or stops using tools. `train` "
        "watches for it, and `doctor RUN_DIR` examines it."
    )
    return x


def of_run(directory: Path, config: TrainConfig, status: Status, *, everything: bool, model: bool) -> Examination:
    """The examination of a run directory. Raises UserError if the run has finished no step and does not say why it ended."""
    x = Examination(config.env, config.model)
    rows = read_metrics(directory)
    if lost := lines_lost(directory, rows):
        x.limits.append(f"metrics.jsonl: {lost}.")
    stopped = stop_finding(directory, rows)
    if not rows and stopped is None:
        raise UserError(
            f"{directory}: metrics.jsonl: {lost}"
            if lost
            else f"{directory} has no finished training step yet, so there is nothing to examine"
        )
    judged = course_of(directory, config, rows)
    _records(x, directory, status, model=model)
    x.add("settings", *settings_checks(config))
    x.add("trends", *judged.findings())
    if stopped is not None:  # a run that ends is a consequence of what went wrong before
        x.add("run" if not x.names_reason else "trends", stopped)
    if rows:
        x.notes.append(f"{judged.progress()[0].upper()}{judged.progress()[1:]}.")
    exact = any(source == "records" and f.cause and not is_symptom(f.cause) for source, f in x.found)
    if config.mixture:
        x.limits.append("The run has several environments, which are examined one at a time: `doctor ENV`.")
        return x
    if exact and not everything:
        return x
    environments: Sequence[Any] | None = None
    try:
        environments = _play(x, config)
    except Exception as error:  # it may not be installed here, or its data may be gone
        x.limits.append(f"The run's environment was not examined: {first_line(error)}")
    if x.names_reason and not everything:
        return x
    if (why := _why_no_model(directory, config, model, environments)) is not None:
        x.limits.append(f"The run's model was not examined: {why}.")
        return x
    try:
        # How often the model succeeds, the run's own rollouts show better.
        _with_model(x, config, environments or (), status, judged=False)
    except Exception as error:  # the model may not be here, or too large for this machine
        x.limits.append(f"The run's model was not examined: {first_line(error)}")
    return x


def _why_no_model(directory: Path, config: TrainConfig, model: bool, environments: Sequence[Any] | None) -> str | None:
    if not model:
        return "it was not to be loaded"
    if environments is None:
        return "it needs the run's environment"
    if is_in_use(directory):
        return "the run is in progress, and a second model may not fit beside it"
    if config.vllm_url:
        return f"it would give other weights to the server at {config.vllm_url[0]}"
    return None


def _play(x: Examination, config: TrainConfig) -> Sequence[Any]:
    """Play the environment; returns its tasks."""
    with fast_imports(f"verifiers and the environment {config.env}"):
        import_verifiers()
        from plumbob.doctor.environment import matrix, table
        from plumbob.trainer.doctor.player import VerifiersPlayer
        from plumbob.trainer.rollouts.tasks import load_environments
    environments = load_environments(config)
    with asyncio.Runner() as runner:
        player: Any = VerifiersPlayer(config, environments[0], runner)
        played = matrix.play(player, config.seed)
        x.add("environment", *table.judge(played))
        count = min(matrix.MOST_TASKS, len(player.train))
    x.limits.append(
        f"{count} training tasks were played without a model, in {played.rollouts} rollouts: a fault of fewer than "
        f"{missed(count):.0%} of all tasks can be missed."
    )
    return environments


def _read_template(x: Examination, config: TrainConfig, tasks: Any) -> None:
    """Whether the calls that the model's chat template asks for are read. It needs the tokenizer alone."""
    from plumbob.trainer.policy.loading import load_chat, load_tokenizer
    from plumbob.trainer.rollouts.templates import opening_messages, tool_names, unread_form

    if not tool_names(tasks.train[0], tasks.toolsets):
        return
    try:
        template = TemplateChoice(config.chat_template)
        chat = load_chat(load_tokenizer(config.model, template), None, config.tool_format)
    except UserError as error:
        x.limits.append(f"Whether the chat template's calls are read was not examined: {error}")
        return
    unread = unread_form(chat, opening_messages(tasks.train[0]))
    told = f"the chat template {unread or 'writes calls that are read'}"
    check = "calls in the form that the chat template asks for are read"
    x.add("environment", Finding.of(check, "calls-not-read", unread, told, "tools"))


def _import_torch() -> None:
    with fast_imports("torch and transformers"):
        import_transformers()


def missed(count: int) -> float:
    """The largest share of cases that `count` independent samples miss with a probability of 5%: .06 of 48."""
    return 1 - 0.05 ** (1 / max(count, 1))


def _with_model(
    x: Examination, config: TrainConfig, environments: Sequence[Any], status: Status, *, judged: bool
) -> None:
    """Set the run up, take a few steps, and compare their records with the reference. `judged`: their metrics as well."""
    _import_torch()
    with fast_imports("plumbob's trainer"):
        from plumbob.trainer.distributed.world import join_world, leave_world
        from plumbob.trainer.doctor.live import load_subject, record_steps
        from plumbob.trainer.inference.errors import SyncError
        from plumbob.trainer.rollouts.batch import RunFailed
        from transformers.utils import logging

    logging.disable_progress_bar()
    status(f"setting up {config.env} and {config.model}")
    here = join_world()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            try:
                subject = load_subject(config, here, Path(folder), status, environments=environments)
            except SyncError as error:
                check = "the engine takes the weights"
                x.add("records", Finding(check, "fail", str(error), "weights-not-synced", "sync"))
                return
            stack.callback(subject.close)
            for text in subject.run.tasks.notes:
                note(text)
            status(f"taking {STEPS} training steps of {subject.run.rollouts_per_step} rollouts as `train` does")
            try:
                kept = record_steps(subject, STEPS, RECORDED)
            except RunFailed as error:
                check, cause = "rollouts end without errors", error.cause or "rollouts-fail"
                x.add("records", Finding(check, "fail", str(error), cause, "sampling", 1))
                return
            except Exception as error:
                x.add("records", Finding("a training step can be taken", "error", describe(error), None, "loss"))
                return
            status("computing them a second time")
            x.add("records", *_stages(kept, subject, config.seed))
            if judged and kept.metrics:
                groups = config.rollouts_per_step(1) // config.num_generations
                plan = dataclasses.replace(plan_of(config), stale=False, groups=groups)
                x.add("trends", *_first_steps(kept, trends.judge(kept.metrics, plan, patience=len(kept.metrics))))
            rollouts = sum(int(row.get("rollout/count", 0)) for row in kept.metrics)
            x.limits.append(
                f"{rollouts} rollouts were sampled from the model: what happens in fewer than {missed(rollouts):.1%} of them "
                "can be missed."
            )
    finally:
        leave_world()


def _stages(kept: Any, subject: Any, seed: int) -> list[Finding]:
    """The stages of recorded steps, up to the first that differs; the run itself is examined with the first record."""
    from plumbob.doctor.reference.model import load
    from plumbob.doctor.reference.rows import load_tokenizer

    found: list[Finding] = []
    settings = kept.records[0].settings
    try:
        plain, tokenizer = load(settings), load_tokenizer(settings)
    except Exception as error:
        return [_incomplete(error)]
    for k, record in enumerate(kept.records):
        previous, live = (kept.records[k - 1], None) if k else (None, kept.live)
        with plain.having(kept.weights[k]) if k else contextlib.nullcontext():
            if not _compared(found, record, plain, tokenizer, live, seed=seed, previous=previous):
                break
    return merged(found)


def _incomplete(error: Exception) -> Finding:
    return Finding("a recorded step can be computed again", "error", describe(error), None, "logprobs")


def _compared(found: list[Finding], record: Any, *given: Any, **more: Any) -> bool:
    """Add what the stages say of a record; returns whether nothing differs. `given`, `more`: as of `stages.Examined`."""
    from plumbob.doctor import stages

    try:
        outcomes = stages.examine(stages.Examined(record, *given, **more))
    except Exception as error:
        found.append(_incomplete(error))
        return False
    found += of_outcomes(outcomes, record.step + 1)
    return stages.first(outcomes) is None


def _first_steps(kept: Any, judged: trends.Trends) -> Iterator[Finding]:
    """What the metrics of a few steps say, and what a first step without any signal means."""
    # Of what needs more steps, something is said elsewhere.
    found = [f for f in judged.findings() if f.verdict != "unsure"]
    rows, check = kept.records[0].rows, "the first step has a signal"
    if any(row.advantage for row in rows):
        yield from [*found, Finding(check, "pass", "", None, "signal")]
        return
    row, rewards = kept.metrics[0], [r.reward for r in rows]
    worst, best = min(rewards, default=0.0), max(rewards, default=0.0)
    earned = f"{best:.3g}" if worst == best else f"from {worst:.3g} to {best:.3g}"
    cause = "never-succeeds" if best <= NEVER else "too-little-signal"
    said = f"all {len(rows)} rollouts of the first step earn what the others of their group earn, {earned}"
    if row.get("rollout/tools") and not row.get("rollout/tool_calls") and best <= NEVER:
        replies = row.get("rollout/turns", 1.0) * len(rows)
        cause = "calls-not-read"
        said += (
            f", and none of the {replies:.0f} replies has a tool call in a form that is read: the model cannot do the task's form "
            "yet"
        )
    yield Finding(check, "fail", f"{said}. No further step was taken", cause, "signal", 1)
    yield from (f for f in found if f.stage != "signal" and f.cause != cause)


def _records(x: Examination, directory: Path, status: Status, *, model: bool) -> None:
    """The stages of the run's stored records, in the order of its steps, up to the first that differs.

    `model`: whether the model with which the run began may be loaded.
    """
    files = sorted((directory / "records").glob("*.npz"))
    if not files:
        x.limits.append("The run has no records of its steps, so what they computed was not examined.")
        return
    _import_torch()
    with fast_imports("plumbob's trainer"):
        from plumbob.doctor.record import read
        from plumbob.doctor.reference.model import load
        from plumbob.doctor.reference.rows import load_tokenizer

    status(f"computing {min(len(files), MOST_RECORDS)} recorded steps a second time")
    found: list[Finding] = []
    previous, plain, tokenizer = None, None, None
    for path in [*files[: MOST_RECORDS // 2], *files[MOST_RECORDS // 2 :][-MOST_RECORDS // 2 :]]:
        try:
            record = read(path)
            if tokenizer is None:
                tokenizer = load_tokenizer(record.settings)
                plain = load(record.settings) if model and record.step == 0 else None
        except (OSError, ValueError) as error:  # a file of another version, or a model that is gone
            x.limits.append(f"{path.name} was not examined: {first_line(error)}")
            continue
        before = previous if previous is not None and previous.step == record.step - 1 else None
        # Later weights are not stored, so the plain model is that of the first step alone.
        if not _compared(found, record, plain if record.step == 0 else None, tokenizer, previous=before):
            break
        previous = record
    x.add("records", *merged(found))


def describe(error: Exception) -> str:
    """The error and where it was raised: the mistake may be in the environment, the model or the doctor itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
