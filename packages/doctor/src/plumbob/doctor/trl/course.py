"""What the steps of a GRPOTrainer of TRL come to in numbers, by the names that `plumbob.doctor.trends` reads."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plumbob.doctor import trends
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import chosen
from plumbob.doctor.findings import Finding
from plumbob.doctor.measuring import at_random, on_host
from plumbob.doctor.record import StepRecord
from plumbob.doctor.reference.model import plain_name
from plumbob.doctor.run_numbers import gap_limit
from plumbob.doctor.saved import numbers as numbers_of
from plumbob.doctor.trl.recording import cut_off, trained
from plumbob.doctor.trl.settings import settings_of, text_of
from plumbob.doctor.trl.watching import Round

LOGGED = {
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "sampling/sampling_logp_difference/mean": "sync/sampling_gap",
}
"""Name in TRL's log -> name of the same number in the table of trends."""
LIMIT = "max_completion_length"
TINY = 0.02
LEAST = 8
"""Fewest completions, or tokens, that must show the same."""


def plan_of(trainer: Any) -> trends.Plan:
    """What the table of trends must know of a trainer's settings."""
    args = trainer.args
    own = {"learning_rate": args.learning_rate, "warmup": args.get_warmup_steps(trainer.state.max_steps)}
    limits = {LIMIT: f"{LIMIT}={args.max_completion_length}"}
    return trends.Plan(**{**vars(settings_of(trainer, 0)), **own}, limits=limits)


def entries(tensors: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    """[.] float64 of each tensor: entries, the same ones each time, read with one transfer."""
    parts = [p.detach().reshape(-1)[_places(name, p.numel(), p.device)] for name, p in tensors.items()]
    return [own.astype(float) for own in on_host(parts)]


@cache
def _places(name: str, size: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(at_random(name, size)).to(device)


def row_of(
    trainer: Any, made: Round, played: Sequence[tuple[Played, bool]], weights: tuple[list[np.ndarray], ...], step: int
) -> dict[str, float]:
    """The numbers of a step (from 0). `weights`: `entries` of what is trained, when the step before had ended and now."""
    size, rewards = trainer.num_generations, np.array([one.reward for one, _ in played])
    groups = [own[np.isfinite(own)] for own in (rewards[i : i + size] for i in range(0, len(rewards), size))]
    live = [own for own in groups if own.size and np.ptp(own) > 0]
    each = [now - then for then, now in zip(*weights, strict=True)]
    moved, norm = np.concatenate(each), np.linalg.norm(np.concatenate(weights[0]))
    row = numbers_of(int(step) + 1, played, LIMIT) | {
        "groups/tiny_spread_share": sum(np.ptp(g) < TINY * np.abs(g).max() for g in live) / max(len(live), 1),
        "advantage/mean_abs": float(made.output["advantages"].float().abs().mean()),
        "rollout/sampled_tokens": statistics.fmean(map(len, made.ids)) if made.ids else 0.0,
        "optimizer/updates": 1.0,
        "optimizer/update_rms": float(np.sqrt(np.mean(moved**2))),
        "optimizer/relative_update": float(np.linalg.norm(moved) / max(norm, 1e-30)),
    }
    if text_of(trainer.args.optim).startswith("adam"):  # others may leave weights as they are
        row["optimizer/moved_share"] = float((moved != 0).mean())
        row["optimizer/still_tensors"] = float(np.mean([not of.any() for of in each]))
    if trainer.tools:
        row["rollout/tools"] = float(len(trainer.tools))
        # TRL's own count: results that do not fit any more stand in no completion.
        failures = trainer._metrics["train"].get("tools/failure_frequency") or [0.0]
        row["rollout/tool_errors"] = failures[-1] * row["rollout/tool_calls"]
    return row


def ended(trainer: Any, made: Round) -> list[Finding]:
    """Whether completions end as sampled ones do, and those that a limit has cut off are trained as the settings say."""
    found, cut = [_left_out(trainer, made)], [cut_off(trainer, ids) for ids in made.ids]
    if trainer.args.mask_truncated_completions:
        trained_ = [i for i, was in enumerate(cut) if was and made.output["completion_mask"][i].any()]
        told = f"of {sum(cut)} completions without an end token {len(trained_)} are trained"
        check = "mask_truncated_completions keeps completions that a limit cuts off from the loss"
        found.append(Finding.of(check, "loss-mask-wrong", trained_, told, "rows"))
    return found


def _left_out(trainer: Any, made: Round) -> Finding:
    """Whether rewards read completions with all tokens but those of the template: special tokens are left out of texts."""
    tokenizer = trainer._tokenizer
    # None of these says anything: a model that has not learned to leave them out may sample them.
    ends = (*trainer.eos_token_ids, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    own = {i: s for i, s in special.items() if i not in ends and s not in str(tokenizer.chat_template)}
    read = list(map(text_of, made.completions))
    seen = Counter(
        i for ids, text in zip(made.ids, read, strict=False) for i in set(ids) & own.keys() if own[i] not in text
    )
    [(token, count)] = seen.most_common(1) or [(None, 0)]
    told = f"in {count} of {len(read)} completions {own.get(token)!r}, a special token, is sampled and not in the text"
    often = 2 * count >= len(read) >= LEAST
    return Finding.of("rewards read all that completions say", "answers-not-parsed", often, told, "grading")


GIVEN = "log-probabilities that rollout_func returns are the trainer's"
OWN = "rollout_func leaves what the model has not sampled out of the loss"
NOT_SAMPLED = -1.0
"""Nats, below which the trainer puts no token that was sampled with the probability of 1 that rollout_func gives it."""


def given(plan: trends.Plan, record: StepRecord, first: float | None) -> tuple[list[Finding], float | None]:
    """Whether log-probabilities that a rollout_func returns are of the tokens that are trained, and of present weights.

    `first`: their mean difference to the trainer's in the first record, in nats a token; None if it is not known yet. Returns
    the findings, and `first` for the next record.
    """
    pairs = [(row.sampling_logprobs, row.logprobs) for row in record.rows]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return [], first
    returned, own = (np.concatenate(of).astype(float) for of in zip(*known, strict=True))
    sure = returned == 0
    foreign = int((sure & (own < NOT_SAMPLED)).sum())
    told = f"{foreign} trained tokens have the log-probability 0 in what it returns, and less than {NOT_SAMPLED:g} by the trainer"
    wrong = foreign >= LEAST and not sure.all()
    found = [Finding.of(OWN, "loss-mask-wrong", wrong, told, "rows")]
    if wrong or sure.all():
        return found, first
    gap = float(np.abs(returned - own)[~sure].mean())
    first = gap if first is None else first
    told = f"they differ by {gap:.2g} nats a token (in the first record by {first:.2g})"
    late = gap > max(gap_limit(plan), 100 * first)
    return [*found, Finding.of(GIVEN, "weights-not-synced", late, told, "sync")], first


SAVED = "what save_model writes is the trained model"
COMPARED, ULPS = 8, 4
"""Tensors of a saved model that are compared, and units in the last place by which a merged one may differ."""


def saved(trainer: Any, folder: Path) -> Finding:
    """Whether what `save_model` has just written is what the trainer has in memory: its trained tensors, or, of an adapter that is
    merged, the weights with it.
    """
    from safetensors import safe_open

    model, places = trainer.accelerator.unwrap_model(trainer.model), dict[str, Path]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file)
    own = {name.replace(".default.", "."): p.detach() for name, p in trained(trainer).items()}
    merged = {plain_name(f"{n}.weight"): m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    names = [name for name in own if name in places] or [name for name in merged if name in places]
    apart = []
    for name in (names[i] for i in chosen(len(names), COMPARED)):
        with safe_open(places[name], "pt") as tensors:
            there = tensors.get_tensor(name)
        if name in own:
            here, room = own[name], 0.0
        else:
            layer = merged[name]
            here = layer.get_base_layer().weight.detach() + layer.get_delta_weight(layer.active_adapters[0])
            room = ULPS * torch.finfo(there.dtype).eps if there.is_floating_point() else math.inf
        here = here.to("cpu", there.dtype)
        if here.shape != there.shape or bool(((there - here).abs() > room * here.abs()).any()):
            apart.append(name)
    told = f"of {min(len(names), COMPARED)} tensors in {folder} {len(apart)} are not those that were trained"
    if not names:
        told = f"{folder} has no tensors of the names of those that are trained"
        return Finding(SAVED, "unsure", told, None, "saved")
    told += f", such as {apart[0]}" if apart else ""
    return Finding.of(SAVED, "saved-model-differs", apart, told, "saved")
