"""The end of a run: the final model, its comparison with the trained one, summary.json, the printed result, the upload."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from plumbob.console import UserError, counted, first_line
from plumbob.console.files import write_whole
from plumbob.console.working import Working
from plumbob.trainer.config.train import EVALUATED
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.policy.forward_plan import own_logprobs
from plumbob.trainer.policy.gpu_memory import memory_of
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.report.write import write_at_end
from plumbob.trainer.reporting.hub_upload import push_to_hub
from plumbob.trainer.reporting.model_card import model_card
from plumbob.trainer.reporting.progress_table import bars_for, sparkline
from plumbob.trainer.run_files.manifest import damage
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.run import Run, kept_step
from plumbob.trainer.training.sft.demonstrations import counts
from plumbob.trainer.watch.warnings import read_warnings


def finish(run: Run, seconds: float) -> int:
    """Write the final model and the summary, print the result, upload the model if asked. Returns the exit code.

    The final model is that of the last step, or with --keep-best that of the best one. Only rank 0 calls this, or every
    process where weights are divided.
    """
    directory, again = run.directory, f"Free some space, then:  {run.resume_command}"
    if run.policy.sharding.collective_forward:
        run.world.barrier()  # rank 0 may still be renaming the last checkpoint
    if checkpoint.latest(directory) != directory / f"checkpoints/step_{run.state.step}":
        print(f"The last step has no checkpoint. {again}", file=sys.stderr)
        return 1
    try:
        with Working("saving the model", silent=not run.world.is_main) as line:
            _load_best(run)
            run.policy.save_final(directory / "model")
            if not run.world.is_main:
                return 0
            run.tokenizer.save_pretrained(directory / "model")
            # Before the comparison too: loading the model again takes memory, and may end the process.
            _write_summary(run, seconds, {})
            line.say("comparing the saved model with the trained one")
            compared, differs = _compare_saved(run)
            _write_summary(run, seconds, compared)
    except checkpoint.WRITE_ERRORS as error:
        print(f"The final model could not be written: {error}. {again}", file=sys.stderr)
        return 1
    _print_result(run, seconds)
    if differs:
        print(differs, file=sys.stderr)
    return _upload(run) if run.config.push_to_hub else 0


def write_report(directory: Path) -> None:
    """Write report.html into the run directory. It is an extra: whatever goes wrong is told in one line."""
    try:
        with Working("writing the report"):
            page = write_at_end(directory)
        print(f"report           {page}")
    except (Exception, KeyboardInterrupt) as error:
        print(
            f"The report could not be written ({type(error).__name__}: {first_line(error)}). Try:  report {directory}",
            file=sys.stderr,
        )


def _load_best(run: Run) -> None:
    """With --keep-best, load the weights of the best step's checkpoint. Raises OSError if it is damaged."""
    step = kept_step(run)
    if step is None or step == run.state.step:
        return
    folder = run.directory / "checkpoints" / f"step_{step}"
    if (wrong := damage(folder)) is not None:
        raise OSError(f"the best checkpoint {folder} is damaged: {wrong}")
    run.policy.restore(folder / "model")


def _compare_saved(run: Run) -> tuple[dict[str, float | str], str]:
    """(what the summary holds of it, a sentence if the saved model, loaded afresh, is not the trained one).

    The summary has `saved_gap`, the difference in nats per token, and `saved_limit`, above which it is an error; or
    `saved_not_compared`, the reason in words.
    """
    if (why := why_not_compared(run)) is not None:
        return {"saved_not_compared": why}, ""
    folders = [run.directory / "model"]
    if run.config.peft:  # an adapter that names the wrong base is another model
        folders.append(run.directory / f"checkpoints/step_{_model_step(run)}/model")
    largest, limit = 0.0, saved_limit(run)
    for folder in folders:
        try:
            gap = saved_gap(run, folder)
        except Exception as error:  # whatever loading a model raises: the run itself is over and well
            why = f"{folder} cannot be loaded: {first_line(error)}"
            return {"saved_not_compared": why}, f"The model in {why}"
        if not gap <= limit:
            return {"saved_gap": gap, "saved_limit": limit}, (
                f"The model in {folder}, loaded afresh, is not the one that was trained: their log-probabilities "
                f"differ by {gap:.2g} nats per token (saved-model-differs)."
            )
        largest = max(largest, gap)
    return {"saved_gap": largest, "saved_limit": limit}, ""


def _model_step(run: Run) -> int:
    """The step whose policy the final model is."""
    return kept_step(run) or run.state.step


def _write_summary(run: Run, seconds: float, compared: dict[str, float | str]) -> None:
    summary: dict[str, Any] = {
        "seconds": seconds,
        "model_step": _model_step(run),
        "evaluations": run.state.saved_evaluations(),
        **compared,
    }
    if run.demonstrations:
        summary["imitated"] = counts(run.demonstrations)
    if run.state.best is not None:
        summary["best"] = run.state.best.to_json()
    write_whole(run.directory / "summary.json", json.dumps(summary, indent=2))


def _print_result(run: Run, seconds: float) -> None:
    rows = read_metrics(run.directory)
    imitates = any("sft/loss" in row for row in rows)
    name, what = ("sft/loss", "training loss") if imitates else ("reward/mean", "training reward")
    values = [row[name] for row in rows]
    columns = shutil.get_terminal_size().columns
    print()
    _print_evaluations(run.state.evaluations, run.sampler.num_held_out, columns)
    for line in (*_best_lines(run, rows), *(() if imitates else _warnings(rows))):
        print(textwrap.fill(line, max(columns, 20)))
    if values:
        ends = f"{what:<16} {values[0]:.3f} ", f" {values[-1]:.3f}"
        width = max(min(60, columns - sum(map(len, ends))), 1)
        print(sparkline(values, width, bars_for(sys.stdout)).join(ends))
    print(f"time             {seconds:.0f} s")
    print(f"run directory    {run.directory}")


def _best_lines(run: Run, rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Which step's policy the final model is, if --keep-best chose it. `rows`: metrics of the run's steps."""
    best = run.state.best
    if best is None or best.kept is None:
        return
    name, kept = best.metric, best.kept
    values = {int(row["step"]): row[name] for row in rows if name in row}
    last = max(values, default=kept.step)
    chosen = f"model/ holds the policy of step {kept.step}, the best of {len(values)} by {name} ({kept.value:.3f}"
    yield chosen + (")." if last == kept.step else f"; step {last}: {values[last]:.3f}).")
    before = run.state.evaluations.get("before", {}).get(name.removeprefix(EVALUATED))
    if before is not None and before.mean >= kept.value:
        yield f"Before training, {name} was as high or higher: {before.mean:.3f}."


def _warnings(rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """What was lost of a run, in true sentences. `rows`: metrics of its steps."""
    empty = sum(not row["groups/count"] for row in rows)
    if empty:
        yield f"In {empty} of {len(rows)} steps no rollout could be used, so they trained nothing."
    if empty < len(rows) and all(row["groups/zero_signal"] == row["groups/count"] for row in rows):
        yield (
            "No group had a signal: in every step all usable rollouts of each task got the same reward, so nothing was "
            "learned."
        )
    kinds = {
        "rollout/errored": "failed",
        "rollout/no_turn": "had no turn",
        "rollout/not_finite": "were not finite",
        "rollout/stale": "were older than --max-staleness allows, or in a group with one that was",
    }
    lost = {what: int(sum(row.get(name, 0) for row in rows)) for name, what in kinds.items()}
    if any(lost.values()):
        stuck = int(sum(row.get("rollout/stuck", 0) for row in rows))
        parts = [f"{count} {what}" for what, count in lost.items() if count]
        if stuck:
            parts[0] += f" ({stuck} of them hung)"
        count = int(sum(row["rollout/count"] for row in rows))
        yield f"Of {count} training rollouts, {', '.join(parts)}; they were left out."


def _print_evaluations(evaluations: Mapping[str, Mapping[str, Estimate]], num_tasks: int, columns: int) -> None:
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    if not after:
        return
    print(f"held-out reward, {counted(num_tasks, 'task')}, 95% intervals:")
    width = max(8, *map(len, after))
    for how in sorted(after, key=lambda how: how.partition("/")[2]):  # those of all environments, then of each
        if how in before:
            lift = after[how].mean - before[how].mean
            line = f"  {how:<{width}} {before[how]} -> {after[how]}   ({lift:+.3f})"
            narrow = f"  {how:<{width}} {before[how]} ->\n{'':{width + 3}}{after[how]}   ({lift:+.3f})"
            print(line if len(line) <= columns else narrow)
        else:
            print(f"  {how:<{width}} {after[how]}")


def _upload(run: Run) -> int:
    folder = run.directory / "model"
    try:
        rows, warned = read_metrics(run.directory), read_warnings(run.directory)
        card = model_card(run.config, run.state.evaluations, rows, warned)
        write_whole(folder / "README.md", card)
        print(f"uploaded to      {push_to_hub(folder, run.config.hub_model_id or run.directory.name)}")
    except (UserError, OSError) as error:
        print(f"The model is in {folder}, but was not uploaded: {error}", file=sys.stderr)
        return 1
    return 0


GAP, GAP_BF16 = 1e-5, 0.01
"""Largest `saved_gap` of a run in float32, and of one with --bf16, where it is higher because it was measured on CPUs only."""


def why_not_compared(run: Run) -> str | None:
    """Why the saved model cannot be loaded beside the trained one, in words; None: it can.

    It is loaded in float32, 4 bytes per parameter, which may take half of the memory that is free.
    """
    if run.policy.sharding.collective_forward:
        return "the trained one is divided among processes"
    size = 4 * run.policy.num_parameters
    free = {"the machine": free_memory()}
    if (memory := memory_of(run.policy.device)) is not None:
        free["the GPU"] = memory.free
    for place, room in free.items():
        if 2 * size > room:
            return (
                f"its {size / 1e9:.1f} GB would take more than half of the {room / 1e9:.1f} GB that are free on {place}"
            )
    return None


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: of the machine, or of the container's limit (cgroup v2), if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):  # no container, or another system
        return free


def saved_limit(run: Run) -> float:
    """The largest `saved_gap` that is no sign of another model, in nats per token.

    The two are not computed in the same way, and some models are far from what float64 says of them: log-probabilities of
    Qwen2.5-Coder-0.5B differ by 3e-5 nats in float32 where nothing is wrong (CPU).
    """
    return max(GAP_BF16 if run.config.bf16 else GAP, run.policy.plan.limit)


@torch.no_grad()
def saved_gap(run: Run, folder: Path) -> float:
    """Mean |difference| of log-probabilities of the policy and of the model in `folder`, on the run's fixed ids, in nats.

    The larger one of the model's and of the adapter's in `folder`/adapter, where there is one.

    Temperature 1. All are computed in float32, also in a run with `--bf16`: in bfloat16, adding the adapter's output to a
    layer's and multiplying by the sum of their weights round differently, by more the longer the adapter is trained (0.12 to
    0.22 nats after 30 steps of Qwen2.5-Coder-0.5B in which nothing was wrong), which would hide a model that is another one.
    The policy's weights must be whole in this process.
    """
    policy = run.policy
    with policy.in_float32():
        policy.model.set_attn_implementation(policy.plan.own_attention)
        try:
            trained = own_logprobs(policy.model, run.parity_row.token_ids).cpu()
        finally:
            policy.model.set_attn_implementation(policy.plan.attention)
    gaps = [(_logprobs(run, load_model(str(folder), policy.device)) - trained).abs().mean().item()]
    if (folder / "adapter").is_dir():
        from peft import PeftModel

        # Whoever loads the adapter puts it on the model that the run began with.
        base = load_model(run.config.model, policy.device)
        gaps.append((_logprobs(run, PeftModel.from_pretrained(base, folder / "adapter")) - trained).abs().mean().item())
    return max(gaps)


def _logprobs(run: Run, model: Any) -> torch.Tensor:
    """Log-probabilities of the run's fixed ids by a model that was loaded afresh."""
    model = model.to(run.policy.device).eval()
    model.set_attn_implementation(run.policy.plan.own_attention)
    return own_logprobs(model, run.parity_row.token_ids).cpu()
