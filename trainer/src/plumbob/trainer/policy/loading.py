"""Load models, tokenizers and chat templates by name; defaults of a run that depend on the model."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from plumbob.console import UserError, first_line
from plumbob.rollout import Chat, ChatTemplateError
from plumbob.rollout.tool_formats import named
from plumbob.trainer.algorithm.learning_rate import default_rate
from plumbob.trainer.config.chat_template import OWN, TemplateChoice
from plumbob.trainer.policy.gpu_memory import has_room
from plumbob.trainer.run_files.model_path import ADAPTER_CONFIG, check_model_exists, model_path
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

CPU = torch.device("cpu")


def load_tokenizer(name: str, template: TemplateChoice = OWN) -> Any:
    """Load a model's tokenizer, with its own chat template or another.

    Raises UserError if the model does not exist or has no chat template, or the chosen one cannot be used.
    """
    check_model_exists(name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path(name))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of model {name!r}: {first_line(error).rstrip('.')}") from None
    tokenizer.chat_template = template.text(tokenizer.chat_template or None)
    if not tokenizer.chat_template:
        raise UserError(f"model {name!r} has no chat template; use an instruct model, or give --chat-template FILE")
    return tokenizer


def load_model(name: str, device: torch.device = CPU) -> PreTrainedModel:
    """Load a model in float32, because bfloat16 weights would round most of a small update away.

    A LoRA adapter is merged into its base model. `device`: a GPU that the weights are read onto if its memory is enough, which
    is faster than to read them onto the CPU first. Raises UserError if the model cannot be loaded.
    """
    path, model = model_path(name), None
    if device != CPU and has_room(device, 4 * empty_model(name).num_parameters()):
        with suppress(torch.OutOfMemoryError):  # another process has taken the memory meanwhile
            model = _load(name, path, device)
    model = model or _load(name, path, CPU)
    # An adapter that is trained on this model records this name as its base. After a merge it would be that of the
    # merged adapter's base, without the adapter; a relative path would be wrong in another working directory.
    model.name_or_path = str(Path(path).resolve()) if Path(path).exists() else path
    return model


def empty_model(name: str) -> PreTrainedModel:
    """The model without memory for its weights, on torch's device "meta": of one on the hub only its configuration is loaded.

    An adapter counts as its base model, into which it is merged. Raises UserError like `load_model`.
    """
    path = model_path(name)
    try:
        adapter = Path(path) / ADAPTER_CONFIG
        if adapter.is_file():
            return empty_model(json.loads(adapter.read_text())["base_model_name_or_path"])
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"cannot load model {name!r}: {first_line(error).rstrip('.')}") from None


def _load(name: str, path: str, device: torch.device) -> PreTrainedModel:
    # With accelerate's default, transformers reads the weights in one process and leaves them uninitialised in the
    # others.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        adapter = Path(path) / ADAPTER_CONFIG
        if not adapter.is_file():
            place = {} if device == CPU else {"device_map": {"": device}}
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **place)
        base = load_model(json.loads(adapter.read_text())["base_model_name_or_path"], device)
        from peft import PeftModel

        return PeftModel.from_pretrained(cast(Any, base), path).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError, EOFError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(f"cannot load model {name!r}: {first_line(error).rstrip('.')}") from None


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the weights of `model` to `dtype` in place, and return it.

    Buffers are not cast, because rotary frequencies must be float32 in every precision: in bfloat16 they are off by up
    to 0.4%, which is an angle of radians after a thousand tokens.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def positions_of(model: PreTrainedModel) -> int | None:
    """The longest context that the model was made for, in tokens; None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_context(model: PreTrainedModel, max_context: int) -> None:
    """Raise UserError if --max-context is more than the model's positions."""
    positions = positions_of(model)
    if positions is not None and max_context > positions:
        raise UserError(f"--max-context {max_context} is more than the {positions} positions of the model; lower it")


def load_generation_config(name: str) -> GenerationConfig | None:
    """The generation config of a model, without loading its weights; None if it has none."""
    try:
        return GenerationConfig.from_pretrained(model_path(name))
    except OSError:
        return None


def load_chat(
    tokenizer: Any,
    generation_config: GenerationConfig | None,
    tool_format: str | None = None,
    embedded: int | None = None,
) -> Chat:
    """The tokenizer's chat template. A turn ends at the template's own end token or one of the generation config's.

    `tool_format`: the name of one, or None to choose it from the chat template. `embedded`: number of ids that the model knows.
    Raises UserError if the chat template cannot be used, or writes ids that the model does not know.
    """
    eos = generation_config.eos_token_id if generation_config is not None else None
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    try:
        chat = Chat.of(
            tokenizer,
            stop_token_ids=ids,
            tool_format=None if tool_format is None else named(tool_format),
        )
        highest = max(chat.prompt([{"role": "user", "content": "?"}], tools=[]).token_ids) if embedded else -1
    except ChatTemplateError as error:
        raise UserError(f"this model's chat template cannot be used: {error}") from None
    if embedded is not None and highest >= embedded:
        raise UserError(
            f"this model's chat template writes the token {tokenizer.convert_ids_to_tokens(highest)!r} with id {highest}, and the "
            f"model knows {embedded} ids: tokens were added to the tokenizer, and the model was not resized for them"
        )
    return chat


TINY = 10_000_000
"""Models with fewer parameters than this need other defaults than real models. The bundled policy has 0.4 million."""


def threads_for(model: PreTrainedModel, processes: int = 1, *, beside_gpu: bool = False) -> int:
    """Number of CPU threads of each of so many processes: OMP_NUM_THREADS, else all CPUs divided; a single one for a tiny model.

    The operations of a tiny model are too short to divide: two threads took up to 30 times as long. So are those that are left
    to the CPU where a GPU computes the model (`beside_gpu`): to lay out a microbatch of 21,000 tokens took two threads 90 ms and
    one 7 ms. A launcher sets OMP_NUM_THREADS to 1 for several processes if nobody has set it, so that 1 says nothing there.
    """
    if model.num_parameters() < TINY:
        return 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    said = given.isdecimal() and int(given) > (1 if processes > 1 else 0)
    return int(given) if said else 1 if beside_gpu else max(1, (os.cpu_count() or 1) // processes)


def default_learning_rate(model: PreTrainedModel, peft: bool, *, imitates: bool = False) -> float:
    """Default learning rate of this model: see `default_rate`."""
    return default_rate(tiny=model.num_parameters() < TINY, peft=peft, imitates=imitates)
