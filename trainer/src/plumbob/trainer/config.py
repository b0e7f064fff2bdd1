"""Every setting of a run, its help text and its checks. Imports nothing heavy: `train --help` reads this file."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from plumbob.hub.errors import UserError

BUNDLED_MODELS = ("tiny",)

FIXED_ON_RESUME = (
    "env",
    "env_args",
    "datasets",
    "eval_datasets",
    "model",
    "peft",
    "lora_r",
    "lora_alpha",
    "lora_targets",
)
"""What a checkpoint belongs to; another value would be another run."""

LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def _option(default: Any, help: str, *names: str) -> Any:
    """A field that is also a command-line option `--name-with-dashes`; `names` adds spellings."""
    return field(default=default, metadata={"help": help, "names": names})


@dataclass(frozen=True)
class TrainConfig:
    """A run. Example: `TrainConfig(env="lookup", model="tiny", max_steps=30, seed=0)`."""

    env: str = "lookup"

    model: str = _option(
        "tiny", "A model folder or hub name with a chat template, or 'tiny' for the bundled policy.", "-m"
    )
    datasets: str | None = _option(
        None, "The environment's training data, if it takes any: a path, a hub name, 'synthetic'."
    )
    eval_datasets: str | None = _option(None, "The same for the held-out tasks.")
    env_args: tuple[str, ...] = _option(
        (), "A setting of the environment as key=value; may be repeated.", "--env-arg", "-a"
    )
    seed: int = _option(0, "Seeds the order of tasks, every rollout and the initial adapter.")

    max_steps: int = _option(30, "Optimizer steps.")
    num_generations: int = _option(8, "Group size: rollouts of one task per step.")
    batch_size: int = _option(32, "Rollouts per forward and backward pass.")
    gradient_accumulation_steps: int = _option(
        4, "Passes per optimizer step; batch size times this is a step's rollouts."
    )
    learning_rate: float | None = _option(
        None, "Peak rate. Default: 1e-6 full, 1e-5 LoRA; 3e-4 and 3e-3 below ten million parameters."
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = _option(
        "linear", "How the rate changes over the run."
    )
    warmup_steps: int = _option(0, "Steps over which the rate rises from 0.")
    max_grad_norm: float = _option(1.0, "The gradient is scaled down to this norm; 0 leaves it alone.")

    loss_type: Literal["dr_grpo", "grpo", "dapo"] = _option("dr_grpo", "How token losses are reduced to one number.")
    scale_rewards: Literal["none", "group", "batch"] = _option(
        "none", "Divide centred rewards by whose standard deviation."
    )
    epsilon: float = _option(0.2, "Importance ratios are clipped to 1 +- this.")

    temperature: float = _option(1.0, "Sampling temperature of training rollouts.")
    max_tokens: int = _option(512, "Most tokens of one turn.")
    max_turns: int = _option(16, "Most turns of one rollout.")
    max_context: int = _option(4096, "Most tokens of one rollout, prompts and tool results included.")
    max_seconds: float = _option(600.0, "Most wall time of one rollout.")
    max_concurrent: int = _option(128, "Rollouts that the engine decodes at once.")

    peft: bool = _option(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = _option(16, "Rank of the adapter.")
    lora_alpha: int = _option(32, "The adapter's output is scaled by alpha / rank.")
    lora_dropout: float = _option(
        0.0, "Dropout before the adapter; above 0 the trained distribution is not the sampled one."
    )
    lora_targets: str = _option(LORA_TARGETS, "Modules that get an adapter, separated by commas.")
    bf16: bool = _option(False, "Generate in bfloat16 and train under autocast; the trained weights stay float32.")

    eval_examples: int = _option(256, "Held-out tasks evaluated before and after training; 0 for none.")
    save_steps: int = _option(50, "Steps between checkpoints; the last step is always saved.")
    output_dir: str = _option("runs", "Where run directories are made.", "-o")
    run_name: str | None = _option(None, "The run directory's name. Default: environment, model and time.")
    threads: int = _option(0, "CPU threads of the math library; 0 lets plumbob choose.")

    def __post_init__(self) -> None:
        hints = get_type_hints(TrainConfig)
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _coerce(f.name, getattr(self, f.name), hints[f.name]))
        for name in (
            "max_steps",
            "batch_size",
            "gradient_accumulation_steps",
            "max_tokens",
            "max_turns",
            "max_context",
        ):
            _require(getattr(self, name) >= 1, f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("max_concurrent", "lora_r", "save_steps"):
            _require(getattr(self, name) >= 1, f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        _require(self.num_generations >= 2, "--num-generations must be at least 2: a group of one has no baseline")
        _require(
            self.rollouts_per_step % self.num_generations == 0,
            f"a step of {self.rollouts_per_step} rollouts (--batch-size {self.batch_size} x "
            f"--gradient-accumulation-steps {self.gradient_accumulation_steps}) does not hold whole groups of "
            f"--num-generations {self.num_generations}",
        )
        _require(self.temperature > 0, "--temperature must be above 0: greedy rollouts of one task would all be equal")
        _require(self.learning_rate is None or self.learning_rate > 0, "--learning-rate must be above 0")
        _require(self.epsilon > 0, "--epsilon must be above 0")
        _require(0 <= self.lora_dropout < 1, "--lora-dropout must be in [0, 1)")
        _require(self.max_grad_norm >= 0, "--max-grad-norm cannot be negative; 0 leaves the gradient alone")
        _require(self.max_seconds > 0, "--max-seconds must be above 0")
        _require(min(self.eval_examples, self.warmup_steps, self.threads) >= 0, "a count cannot be negative")
        for pair in self.env_args:
            _require("=" in pair, f"--env-arg needs key=value, not {pair!r}")

    @property
    def rollouts_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tasks_per_step(self) -> int:
        return self.rollouts_per_step // self.num_generations

    def to_toml(self) -> str:
        import tomli_w

        values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        values["run_name"] = None  # the directory has it; another run of this file gets a name of its own
        return tomli_w.dumps({k: v for k, v in values.items() if v is not None})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Check a value against its field's type; a TOML file may hold an integer where a float is meant."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        _require(value in choices, f"{flag(name)} must be one of {', '.join(choices)}, not {value!r}")
        return value
    if get_origin(hint) is tuple:
        _require(isinstance(value, list | tuple), f"{flag(name)} must be a list, not {value!r}")
        return tuple(str(item) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    matches = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    _require(matches, f"{flag(name)} must be of type {hint.__name__}, not {value!r}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file. Raises UserError for a missing or broken file and for an unknown key."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    names = [f.name for f in dataclasses.fields(TrainConfig)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise UserError(f"{path} has an unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return values


def options() -> list[tuple[dataclasses.Field[Any], Any]]:
    """(field, annotation for typer) of every setting that is an option. Unset options are None, so that a file's hold."""
    import typer

    hints = get_type_hints(TrainConfig)
    result = []
    for f in dataclasses.fields(TrainConfig):
        if "help" not in f.metadata:
            continue
        hint = hints[f.name]
        if get_origin(hint) is tuple:
            hint = list[str]
        default = (
            "" if f.default in (None, ()) else f" [default: {str(f.default).lower() if hint is bool else f.default}]"
        )
        names = (
            [flag(f.name), *f.metadata["names"]]
            if hint is not bool
            else [f"{flag(f.name)}/--no-{f.name.replace('_', '-')}"]
        )
        if f.name == "env_args":
            names = list(f.metadata["names"])
        result.append(
            (f, Annotated[hint | None, typer.Option(*names, help=f.metadata["help"] + default, show_default=False)])
        )
    return result
