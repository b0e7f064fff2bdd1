"""`train ... --dry-run`: the settings of a run with where they come from, its memory by part, and what a step's time depends on.

Nothing is started or written, but that with `--resume` what an interrupted save left is tidied up, as by a run. No weights are
loaded, and of a model on the hub only its configuration is downloaded: the model is built without memory for its weights (torch's
device "meta"), and its shapes are counted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from plumbob.console import UserError
from plumbob.trainer.algorithm.losses import try_own_loss
from plumbob.trainer.config.chat_template import TemplateChoice
from plumbob.trainer.config.options import as_text, flag, grouped
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.launcher import requested
from plumbob.trainer.policy.loading import check_context, default_learning_rate, empty_model, load_chat, load_tokenizer
from plumbob.trainer.reporting.trackers import check_reporting
from plumbob.trainer.rollouts.tasks import Read, read_here
from plumbob.trainer.rollouts.templates import check_template
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.run_files.run_directory import (
    check_can_be_made,
    check_is_free,
    read_metrics,
    run_config,
    run_directory_of,
)
from plumbob.trainer.training.capacity.disk_space import size
from plumbob.trainer.training.capacity.memory_plan import memory, plan_memory, room_of
from plumbob.trainer.training.capacity.out_of_memory import GIB
from plumbob.trainer.training.metrics import main_gib
from plumbob.trainer.training.restore import choose_checkpoint
from plumbob.trainer.training.setup import check_room
from transformers import PreTrainedModel

ALIKE = (
    *("env", "model", "env_args", "num_generations", "batch_size", "gradient_accumulation_steps", "max_tokens"),
    *("max_context", "bf16", "peft", "num_iterations", "num_minibatches"),
)
"""Settings that an earlier run must share, so that the time of its steps is an estimate of this run's."""


def dry_run(
    config: TrainConfig, resumed: Path | None, read: Sequence[Read | None] = (), *, origins: Mapping[str, str]
) -> int:
    """Examine the settings as a run does before it loads weights, and print what it would be; returns the exit code.

    `read`: of `read_here`. `origins`: setting -> where its value comes from. Raises UserError with the sentence with which
    the run would end.
    """
    check_reporting(config)
    request, processes = requested(), int(os.environ.get("WORLD_SIZE", "1"))
    config = dataclasses.replace(config, bf16=config.bf16 or request.bf16)
    config.rollouts_per_step(processes)
    try_own_loss(config.objective(), bool(config.kl_beta))
    unread = _check_tasks(config, resumed, read)
    plan = plan_memory(config, processes)
    config = plan.config
    model = empty_model(config.model)
    check_context(model, config.max_context)
    if config.peft:
        from plumbob.trainer.policy.lora import add_lora

        add_lora(model, config)
    if os.environ.get("RANK", "0") == "0":
        if resumed is None:
            check_can_be_made(config)
        else:
            check_is_free(run_directory_of(resumed))
            choose_checkpoint(resumed, config)
        print("\n".join(lines(config, model, processes, origins)))
        if plan.line:
            print(plan.line)
        not_read = f"Not examined, because reading it may download data: {', '.join(unread)}. " if unread else ""
        print(f"{not_read}Nothing was started.")
    return 0


def lines(config: TrainConfig, model: PreTrainedModel, processes: int, origins: Mapping[str, str]) -> Iterator[str]:
    """What is printed."""
    rate = default_learning_rate(model, config.peft, imitates=isinstance(config, SftConfig))
    for heading, fields in grouped(type(config)).items():
        yield f"{heading}:"
        for f in fields:
            value, origin = getattr(config, f.name), origins.get(f.name, "default")
            if f.name == "learning_rate" and value is None:
                value, origin = rate, "default of this model"
            shown = " ".join(value) if isinstance(value, tuple) else "" if value is None else as_text(value)
            yield f"  {flag(f.name):30} {shown or '-':24} {origin}"
    parts = memory(config, model, processes)
    room = room_of(config) or int(main_gib() * GIB)
    yield f"Memory of {'each process' if processes > 1 else 'the run'}, on {'its GPU' if room_of(config) else 'the CPU'}:"
    for part in parts:
        shown = "not known" if part.size is None else size(part.size)
        yield f"  {part.name:30} {shown:>10}  {part.about}".rstrip()
    known = sum(part.size or 0 for part in parts)
    yield f"  {'in all':30} {size(known):>10}  of {size(room)}, libraries and fragments not counted"
    yield from ("Time of a step:", *(f"  {line}" for line in _time(config, model, processes)))


def _check_tasks(config: TrainConfig, resumed: Path | None, read: Sequence[Read | None]) -> list[str]:
    """Load tasks and tokenizer as a run does, where nothing has to be downloaded for them. Returns what was not loaded."""
    read = read or read_here(config)
    loaded = [found.ready() for found in read if found is not None]
    unread = [f"the tasks of {env}" for (env, _), found in zip(config.members, read, strict=True) if found is None]
    if not Path(model_path(config.model)).exists():
        return [*unread, "the tokenizer and its chat template"]
    template = TemplateChoice(config.chat_template, resumed and run_directory_of(resumed))
    chat = load_chat(load_tokenizer(config.model, template), None, config.tool_format)
    for tasks in loaded:
        check_template(chat, tasks, config.model)
        check_room(chat, tasks, config)
    return unread


def _time(config: TrainConfig, model: PreTrainedModel, processes: int) -> Iterator[str]:
    """What a step took in the last run of the same settings, if there is one, and how much there is to do."""
    yield _earlier(config) or f"not known before the first step: no run in {config.output_dir} has such settings"
    rollouts = config.rollouts_per_step(processes)
    tokens = rollouts * config.max_context
    count = sum(p.numel() for p in model.parameters())
    each = ((4 if config.peft else 6) + 2 * config.gradient_checkpointing) * config.num_iterations
    yield f"at most {tokens:,} tokens: {rollouts} rollouts of {config.max_context}, of which the model samples a part"
    yield (
        f"at most {each} x {count:,} parameters x {tokens:,} tokens = {each * count * tokens:.2g} operations to train on "
        "them, on all processes together"
    )


def _earlier(config: TrainConfig) -> str | None:
    """What the steps after the first took in the latest run with such settings; None without one."""
    found = sorted(Path(config.output_dir).glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (path.parent for path in found):
        try:
            other, rows = run_config(folder), read_metrics(folder)[1:]
        except (UserError, OSError, ValueError):
            continue
        same = type(other) is type(config) and all(getattr(other, name) == getattr(config, name) for name in ALIKE)
        seconds = [sum(row.get(f"time/{part}", 0.0) for part in ("rollout", "train", "sync")) for row in rows]
        if same and seconds:
            return f"{median(seconds):.3g} s, the median of the last run with such settings, on its machine: {folder}"
    return None
