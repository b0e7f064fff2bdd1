"""The model that is trained: loading, LoRA, and log-probabilities of sampled tokens only."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from plumbob.hub import UserError
from plumbob.rollout import Chat, ChatTemplateError, Sample
from plumbob.trainer.config import BUNDLED_MODELS, TrainConfig
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"

CHUNK_LOGITS = 1 << 25
"""At most so many logits exist at once: 128 MiB in float32, 220 tokens of a 152k vocabulary."""


def model_path(name: str) -> str:
    """A bundled model's folder, the last checkpoint's of a run directory, or the name as it is."""
    if name in BUNDLED_MODELS:
        return str(Path(__file__).parent / "policies" / name)
    folder = Path(name).expanduser()
    steps = sorted(folder.glob("checkpoints/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    for candidate in (*steps[-1:], folder):
        if (candidate / "model").is_dir() and (candidate / "state.json").is_file():
            return str(candidate / "model")
    return str(folder) if folder.exists() else name


def load_tokenizer(name: str) -> Any:
    """Raises UserError for a missing model and for one without a chat template."""
    path = model_path(name)
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not any((Path(path) / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        raise UserError(f"there is no model in {name!r}: it has no config.json")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of model {name!r}: {_first_line(error)}") from None
    if not tokenizer.chat_template:
        raise UserError(
            f"model {name!r} has no chat template; use an instruct model or add chat_template.jinja to its folder"
        )
    return tokenizer


def load_model(name: str) -> PreTrainedModel:
    """The model in float32: bfloat16 weights would round most of a small step away. An adapter is merged into its base."""
    path = model_path(name)
    try:
        adapter = Path(path) / ADAPTER_CONFIG
        if not adapter.is_file():
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        base = load_model(json.loads(adapter.read_text())["base_model_name_or_path"])
        return PeftModel.from_pretrained(cast(Any, base), path).merge_and_unload()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load model {name!r}: {_first_line(error)}") from None


def check_supported(model: PreTrainedModel, max_context: int) -> None:
    """Raise UserError for an architecture whose distribution the engine and the trainer would get wrong.

    Both compute logits as output embeddings times hidden states, with full attention over the whole context.
    """
    config = model.config.get_text_config()
    name = model.config.model_type
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_context and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"{name} attends over a sliding window of {window} tokens, which plumbob does not support yet; "
            f"with --max-context {window} or less it makes no difference"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UserError(
            f"{name} has layers of another kind than attention, which plumbob does not support yet: {kinds}"
        )
    for scale in ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, scale, None) not in (None, 1, 1.0):
            raise UserError(f"{name} rescales its logits ({scale}), which plumbob does not support yet")


def load_generation_config(name: str) -> GenerationConfig | None:
    """Of a model whose weights are not needed here; None if it has none."""
    try:
        return GenerationConfig.from_pretrained(model_path(name))
    except OSError:
        return None


def load_chat(tokenizer: Any, generation_config: GenerationConfig | None) -> Chat:
    """The chat template, ended by its own end token and by those of the generation config."""
    eos = generation_config.eos_token_id if generation_config is not None else None
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    try:
        return Chat.of(tokenizer, stop_token_ids=ids)
    except ChatTemplateError as error:
        raise UserError(f"this model's chat template cannot be used: {error}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


@dataclass(frozen=True)
class TokenScores:
    """Per sampled token of some rows, concatenated in row order: [N] each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    """In nats; without a gradient."""


class Policy:
    """A causal language model with float32 weights, all of which or an adapter of which are trained."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        if config.peft:
            torch.manual_seed(config.seed)
            model.add_adapter(
                LoraConfig(
                    r=config.lora_r,
                    lora_alpha=config.lora_alpha,
                    lora_dropout=config.lora_dropout,
                    target_modules=_lora_targets(model, config.lora_targets),
                )
            )
        else:
            model.requires_grad_(True)
        self.model = model.to(device)

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.config.bf16 else nullcontext()

    def engine_model(self) -> PreTrainedModel:
        """A copy for the engine to own. Frozen weights of the same dtype are shared, not copied."""
        memo: dict[int, object] = {}
        if not self.config.bf16:
            memo = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        twin = copy.deepcopy(self.model, memo)
        return twin.to(torch.bfloat16) if self.config.bf16 else twin

    def score(self, rows: Sequence[Sample], temperature: float) -> TokenScores:
        """Log-probability and entropy of every sampled token of `rows`, given all that stands before it in its row.

        Rows are padded on the right. Attention is causal and needs no mask: what stands behind a token cannot reach it.
        The loss mask chooses which positions are scored and is nothing the model ever sees.
        """
        width = max(len(row.token_ids) for row in rows)
        ids = torch.tensor([row.token_ids + [0] * (width - len(row.token_ids)) for row in rows], device=self.device)
        loss_mask = torch.tensor(
            [row.loss_mask + [False] * (width - len(row.loss_mask)) for row in rows], device=self.device
        )
        with self.autocast():
            hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            # The logits that score token t are computed at t - 1.
            wanted, targets = hidden[:, :-1][loss_mask[:, 1:]], ids[:, 1:][loss_mask[:, 1:]]
            head = self.model.get_output_embeddings()
            size = max(1, CHUNK_LOGITS // self.model.config.get_text_config().vocab_size)
            chunk = functools.partial(_score_chunk, head, temperature)
            parts = [
                # Logits are computed again for the backward pass, so that only one chunk's exist at a time.
                checkpoint(chunk, h, t, use_reentrant=False) if torch.is_grad_enabled() else chunk(h, t)
                for h, t in zip(wanted.split(size), targets.split(size), strict=True)
            ]
        if not parts:
            empty = torch.zeros(0, device=self.device)
            return TokenScores(empty, empty)
        return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).detach())

    def save(self, folder: Path) -> None:
        """Weights or adapter in the layout that `transformers` loads."""
        self.model.save_pretrained(folder)

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into the live model."""
        if self.config.peft:
            set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))
            return
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(saved.state_dict())


def _score_chunk(
    head: torch.nn.Module, temperature: float, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, D], targets [N] -> log-probabilities [N] and entropies [N] at the sampling temperature."""
    logits = head(hidden).float() / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.no_grad():
        entropies = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprobs, entropies


def _lora_targets(model: PreTrainedModel, names: str) -> list[str]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    have = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    missing = [name for name in wanted if name not in have]
    if missing or not wanted:
        named = ", ".join(missing) or "nothing"
        raise UserError(f"--lora-targets names no module of this model: {named}; it has {', '.join(sorted(have))}")
    return wanted


TINY = 10_000_000
"""Fewer parameters than this, and what suits real models does not: the bundled policy has 0.4 million."""


def default_threads(model: PreTrainedModel) -> int:
    """One for a tiny model, whose operations are too short to share: two threads took up to 30 times as long."""
    return 1 if model.num_parameters() < TINY else os.cpu_count() or 1


def default_learning_rate(model: PreTrainedModel, peft: bool) -> float:
    """LoRA wants about ten times the full rate (Schulman et al., "LoRA Without Regret", 2025); tiny models far more."""
    base = 3e-4 if model.num_parameters() < TINY else 1e-6
    return base * (10 if peft else 1)


def microbatches(rows: Sequence[Sample], size: int) -> Iterator[list[int]]:
    """Indices of rows, `size` at a time, rows of similar length together so that little is padding."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].token_ids))
    for start in itertools.count(0, size):
        if start >= len(order):
            return
        yield order[start : start + size]
