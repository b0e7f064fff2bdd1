"""`train ... --dry-run`: the settings of a run with where they come from, its memory by part, and what a step's time depends on.

Nothing is started or written, but that with `--resume` what an interrupted save left is tidied up, as by a run. No weights are
loaded, and of a model on the hub only its configuration is downloaded: the model is built without memory for its weights (torch's
device "meta"), and its shapes are counted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from plumbob.console import UserError
from plumbob.trainer.algorithm.losses import try_own_loss
from plumbob.trainer.config.chat_template import RECORDED, TemplateChoice
from plumbob.trainer.config.options import as_text, flag, grouped
from plumbob.trainer.config.sft import ORACLE, SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.launcher import requested
from plumbob.trainer.inference.paged.memory import bytes_of_rollout
from plumbob.trainer.policy.loading import default_learning_rate, empty_model, load_chat, load_tokenizer
from plumbob.trainer.policy.token_logprobs import CHUNK_LOGITS, CHUNK_LOGITS_CUDA
from plumbob.trainer.reporting.trackers import check_reporting
from plumbob.trainer.rollouts.tasks import check_settings, load_tasks
from plumbob.trainer.rollouts.templates import check_template
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.run_files.run_directory import (
    check_can_be_made,
    lock_directory,
    read_metrics,
    run_config,
    run_directory_of,
)
from plumbob.trainer.training.demonstrations import trace_paths
from plumbob.trainer.training.disk_space import size
from plumbob.trainer.training.metrics import main_gib
from plumbob.trainer.training.out_of_memory import GIB
from plumbob.trainer.training.restore import choose_checkpoint
from plumbob.trainer.training.setup import check_context
from transformers import PreTrainedModel

ALIKE = (
    *("env", "model", "env_args", "num_generations", "batch_size", "gradient_accumulation_steps", "max_tokens"),
    *("max_context", "bf16", "peft", "num_iterations", "num_minibatches"),
)
"""Settings that an earlier run must share, so that the time of its steps is an estimate of this run's."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What takes a process's memory. `size`: in bytes, or None if it is not known. `about`: how it is known."""

    name: str
    size: int | None
    about: str = ""


def dry_run(config: TrainConfig, resumed: Path | None, origins: Mapping[str, str]) -> int:
    """Examine the settings as a run does before it loads weights, and print what it would be; returns the exit code.

    `origins`: setting -> where its value comes from. Raises UserError with the sentence with which the run would end.
    """
    check_reporting(config)
    request, processes = requested(), int(os.environ.get("WORLD_SIZE", "1"))
    config = dataclasses.replace(config, bf16=config.bf16 or request.bf16)
    config.rollouts_per_step(processes)
    try_own_loss(config.objective(), bool(config.kl_beta))
    unread = _check_tasks(config, resumed)
    if isinstance(config, SftConfig) and config.demonstrations != ORACLE and resumed is None:
        trace_paths(config.demonstrations, config.env)
    model = empty_model(config.model)
    check_context(model, config)
    if config.peft:
        from plumbob.trainer.policy.lora import add_lora

        add_lora(model, config)
    if os.environ.get("RANK", "0") == "0":
        if resumed is None:
            check_can_be_made(config)
        else:
            with lock_directory(run_directory_of(resumed)):
                choose_checkpoint(resumed, config)
        print("\n".join(lines(config, model, processes, origins)))
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
    room = _gpu() or int(main_gib() * GIB)
    yield f"Memory of {'each process' if processes > 1 else 'the run'}, on {'its GPU' if _gpu() else 'the CPU'}:"
    for part in parts:
        shown = "not known" if part.size is None else size(part.size)
        yield f"  {part.name:30} {shown:>10}  {part.about}".rstrip()
    known = sum(part.size or 0 for part in parts)
    yield f"  {'in all':30} {size(known):>10}  of {size(room)}, libraries and fragments not counted"
    yield from ("Time of a step:", *(f"  {line}" for line in _time(config, model, processes)))


LOCAL = (".jsonl", ".json", ".gz", ".csv", ".parquet", ".txt")
"""Endings of the names of files of tasks."""


def _check_tasks(config: TrainConfig, resumed: Path | None) -> list[str]:
    """Load tasks and tokenizer as a run does, where nothing has to be downloaded for them. Returns what was not loaded."""
    unread, loaded = [], []
    for own in config.for_each_environment():
        data = [name.split(",")[0] for name in (own.datasets, own.eval_datasets) if name is not None]
        here = [name == "synthetic" or name.endswith(LOCAL) or Path(name).exists() for name in data]
        if own.datasets is not None and all(here):
            loaded.append(load_tasks(own))
        else:
            check_settings(own)
            unread.append(f"the tasks of {own.env}")
    if not Path(model_path(config.model)).exists():
        return [*unread, "the tokenizer and its chat template"]
    recorded = None if resumed is None else run_directory_of(resumed) / RECORDED
    template = TemplateChoice(config.chat_template, recorded)
    chat = load_chat(load_tokenizer(config.model, template), None, config.tool_format)
    for tasks in loaded:
        check_template(chat, tasks, config.model)
    return unread


def memory(config: TrainConfig, model: PreTrainedModel, processes: int = 1) -> list[Part]:
    """What a process's weights, gradients, optimizer, engine and activations take.

    `model`: without memory for its weights, and with its adapter if the run trains one.
    """
    request, dtype = requested(), torch.bfloat16 if config.bf16 else torch.float32
    kind = request.kind if processes > 1 else "replicated"
    share = 1 if kind == "replicated" else processes
    of_weights = 1 if kind == "zero" and request.deepspeed["zero_optimization"]["stage"] == 2 else share
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    halved = _frozen_halves(model) if config.peft and config.bf16 else 0
    rollouts, gpu = config.rollouts_per_step(processes) // processes, _gpu()
    engine = config.engine
    if engine == "auto":
        engine = "paged" if gpu and processes == 1 else "transformers"
    slots = min(config.max_concurrent, max(rollouts, 1))
    tokens = min(config.microbatch_tokens, rollouts * config.max_context)
    try:
        cache = slots * bytes_of_rollout(model, dtype, config.max_context)
        activations = activation_bytes(model, tokens, config)
    except AttributeError:  # a model of another form
        cache = activations = None
    parts = [
        Part("weights", (4 * total - 2 * halved) // of_weights, f"{total:,} parameters, {trained:,} trained"),
        Part("gradients", 4 * trained // share),
        Part("optimizer", 8 * trained // share, "both moments of AdamW"),
    ]
    if config.kl_beta and not config.peft:
        parts.append(Part("reference policy", 4 * trained // share))
    if engine == "vllm":
        shares = not config.vllm_url
        taken = int(config.engine_memory * gpu) if shares else 0
        parts.append(Part("vLLM server", taken, "" if shares else "on other devices"))
    else:
        whole = not config.peft or kind != "replicated"  # nothing that the engine could share with the trainer
        copied = total - (0 if whole else halved if config.bf16 else total - trained)
        parts.append(Part("the engine's copy of weights", copied * dtype.itemsize, f"--engine {engine}"))
        if cache is not None and engine == "paged" and gpu:
            cache = min(cache, int(config.engine_memory * gpu))
        parts.append(Part("the engine's cache", cache, f"at most: {slots} rollouts of {config.max_context} tokens"))
    return [
        *parts,
        Part("activations", activations, f"at most: {tokens} tokens of a dense model, within a factor of 2"),
    ]


def _gpu() -> int:
    """Bytes of this process's GPU; 0 without one."""
    return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))[1] if torch.cuda.is_available() else 0


def _frozen_halves(model: PreTrainedModel) -> int:
    """Number of weights that a run with --bf16 and --peft holds in bfloat16: those of frozen linear layers and embeddings."""
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    own = {p for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
    return sum(p.numel() for p in own if not p.requires_grad)


def activation_bytes(model: PreTrainedModel, tokens: int, config: TrainConfig) -> int:
    """What a forward pass of so many tokens keeps for its backward pass, and the logits of a chunk.

    For each entry that a linear layer gives, 2.5 are kept: 2.1 to 3.2 in passes of Llama, Qwen and Gemma 2 of seven sizes on
    torch's device "meta", in both precisions, with all weights and with LoRA. With gradient checkpointing these are every
    layer's input, and what one layer keeps. Raises AttributeError for a model without `layers`.
    """
    layers = cast(Any, model.get_decoder()).layers
    named = (item for layer in layers for item in layer.named_modules())
    linear = [m for name, m in named if isinstance(m, torch.nn.Linear) and "lora_" not in name]
    entries = int(2.5 * sum(m.out_features for m in linear))
    text = model.config.get_text_config()
    if config.gradient_checkpointing:
        entries = entries // len(layers) + len(layers) * text.hidden_size
    logits = min(tokens * text.vocab_size, CHUNK_LOGITS_CUDA if _gpu() else CHUNK_LOGITS)
    halves = sum(m.weight.numel() for m in linear) if config.bf16 and not config.peft else 0  # autocast keeps them
    return tokens * entries * (2 if config.bf16 else 4) + 8 * logits + 2 * halves


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
