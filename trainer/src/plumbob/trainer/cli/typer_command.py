"""The command class of `train` and `doctor`: old spellings, optional values, settings of the environment, grouped help.

The arguments are rewritten before typer reads them; typer's own parsing and help do the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from plumbob.console import UserError
from plumbob.console.help import Command
from plumbob.trainer.config.environment import describe
from plumbob.trainer.config.options import UNKNOWN_OPTIONS, choices_of, flag, spellings
from plumbob.trainer.config.removed import is_switch

OLD_SPELLINGS = {"-lr": "--lr"}
"""Spelling of earlier command lines -> option. Other options with one dash have one letter."""

_HELP = ("version", "install_completion", "show_completion", "help")
"""Options that a section at the end of the help shows."""

COMMON = (
    "model", "datasets", "env_args", "seed", "max_steps", "num_epochs", "num_generations", "batch_size",
    "gradient_accumulation_steps", "learning_rate", "temperature", "max_tokens", "max_turns", "max_context", "engine", "base_url",
    "vllm_url", "bf16", "peft", "lora_r", "loss_type", "kl_beta", "scale_rewards", "eval_examples", "num_examples",
    "rollouts_per_example", "oracle", "replay", "output_dir", "run_name", "report_to",
)  # fmt: skip
"""Settings that `--help` shows. `--help-all` shows the others too."""

_TRUE, _FALSE = ("true", "on", "yes"), ("false", "off", "no")


@dataclass(frozen=True)
class OptionalValue:
    """An option whose value may be left out.

    `bare`: its value then. `off`: the value of its --no- form. `choices`: its allowed values; () if it is a count.
    """

    bare: Any
    off: Any
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Switch:
    """An option that is true or false, and may be followed by `true` or `false`. `negative`: its --no- form."""

    negative: str


Grammar = Mapping[str, OptionalValue | Switch | bool]
"""Option, with its dashes -> how it takes a value; True: it always takes one; False: it never does."""


def rewrite(args: Sequence[str], grammar: Grammar) -> tuple[list[str], list[str]]:
    """Rewrite a command line to (arguments for typer, positional arguments among them).

    An option that the command does not have becomes a value of the hidden option `UNKNOWN_OPTIONS`.
    """
    out: list[str] = []
    positional: list[str] = []
    rest = list(args)
    while rest:
        written = rest.pop(0)
        if written == "--":
            return [*out, written, *rest], [*positional, *rest]
        name, equals, value = written.partition("=")
        name = OLD_SPELLINGS.get(name, name)
        if not name.startswith("--"):
            out.append(written)
            if grammar.get(name) is True and not equals:
                out += _take(rest)
            elif not name.startswith("-"):
                positional.append(written)
            continue
        name = name.replace("_", "-")
        takes, of_no = grammar.get(name), grammar.get(f"--{name.removeprefix('--no-')}")
        if isinstance(takes, OptionalValue):
            out.append(f"{name}={_optional(takes, value if equals else None, rest)}")
        elif isinstance(takes, Switch):
            out.append(_switch(name, takes.negative, value if equals else None, rest))
        elif takes is not None:
            out += [f"{name}={value}"] if equals else [name, *(_take(rest) if takes else [])]
        elif isinstance(of_no, OptionalValue):
            out.append(f"--{name.removeprefix('--no-')}={of_no.off}")
        else:
            taken = [value] if equals else _take_value(rest, is_switch(name[2:].replace("-", "_")))
            out.append(flag(UNKNOWN_OPTIONS) + "=" + "=".join([name[2:], *taken]))
    return out, positional


def _take(rest: list[str]) -> list[str]:
    return [rest.pop(0)] if rest else []


def _take_value(rest: list[str], switch: bool = False) -> list[str]:
    """The next argument, unless it is an option; of a switch only `true` or `false`. A negative number is a value."""
    if switch:
        return _take(rest) if rest and rest[0].lower() in _TRUE + _FALSE else []
    is_option = bool(rest) and rest[0].startswith("-") and not rest[0][1:2].isdigit()
    return [] if is_option else _take(rest)


def _optional(option: OptionalValue, value: str | None, rest: list[str]) -> Any:
    """Value of an option whose value is optional.

    The next argument is taken only if it is one of the option's values.
    """
    if value is None and rest:
        word = rest[0].lower()
        if word in _TRUE + _FALSE or (word in option.choices or (word.isdigit() and not option.choices)):
            value = rest.pop(0)
    if value is None or value.lower() in _TRUE:
        return option.bare
    return option.off if value.lower() in _FALSE else value


def _switch(name: str, negative: str, value: str | None, rest: list[str]) -> str:
    """Rewrite `--peft`, `--peft true` or `--peft=false` to the switch.

    Raises UserError for any other value after `=`.
    """
    if value is None and rest and rest[0].lower() in _TRUE + _FALSE:
        value = rest.pop(0)
    if value is None or value.lower() in _TRUE:
        return name
    if value.lower() in _FALSE:
        return negative
    raise UserError(f"{name} must be true or false, not {value!r}")


def command_class(cls: Any) -> type[Command]:
    """The class of a typer command with the options of the settings `cls`. Its help shows them in their groups."""
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}

    class WithSettings(Command):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.meta["help_all"] = "--help-all" in args
            args = ["--help" if arg == "--help-all" else arg for arg in args]
            rewritten, positional = rewrite(args, _grammar(self.get_params(ctx), fields, hints))
            ctx.meta["positional"] = positional
            return super().parse_args(ctx, rewritten)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            heading = "The run"
            sections: dict[str, list[tuple[str, str]]] = {heading: []}
            left_out = 0
            for param in self.get_params(ctx):
                heading = (fields[param.name].metadata.get("group") if param.name in fields else None) or heading
                row = param.get_help_record(ctx)
                if param.name in fields and param.name not in COMMON and not ctx.meta.get("help_all"):
                    left_out += row is not None
                elif row is not None:
                    where = "Help" if param.name in _HELP else heading
                    sections.setdefault(where, []).append(row)
            sections["Help"] = sections.pop("Help", [])  # at the end
            if left_out:
                sections["Help"].append(("--help-all", f"Show this message with all options: {left_out} more."))
            for named in ctx.meta.get("positional", []):
                env = named.partition(":")[0]
                sections[f"Settings of {env}"] = describe(env, spellings(cls))
            for title, rows in sections.items():
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=34)

    return WithSettings


def _grammar(params: Sequence[Any], fields: Mapping[str, Any], hints: Mapping[str, Any]) -> Grammar:
    found: dict[str, OptionalValue | Switch | bool] = {"--help": False}
    for param in params:
        if param.param_type_name != "option":
            continue
        f = fields.get(param.name)
        takes: OptionalValue | Switch | bool = not param.is_flag
        if f is not None and f.metadata.get("bare") is not None:
            takes = OptionalValue(f.metadata["bare"], f.metadata["off"], choices_of(f, hints[f.name]))
        elif param.is_flag and param.secondary_opts:
            takes = Switch(param.secondary_opts[0])
            found |= dict.fromkeys(param.secondary_opts, False)
        found |= dict.fromkeys(param.opts, takes)
    return found
