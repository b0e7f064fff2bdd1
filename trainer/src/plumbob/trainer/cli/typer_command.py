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
class Grammar:
    """The options of a command by how they take a value. Names include their dashes."""

    valued: frozenset[str]
    """Options that take a value."""
    switches: Mapping[str, str]
    """--name -> --no-name, of options that are true or false; --name may be followed by `true` or `false`."""
    flags: frozenset[str]
    """Options that never take a value."""
    optional: Mapping[str, OptionalValue]
    """Options whose value may be left out."""


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
            if name in grammar.valued and not equals:
                out += _take(rest)
            elif not name.startswith("-"):
                positional.append(written)
            continue
        name = name.replace("_", "-")
        if name in grammar.optional:
            out.append(f"{name}={_optional(grammar.optional[name], value if equals else None, rest)}")
        elif name.startswith("--no-") and (wanted := f"--{name[5:]}") in grammar.optional:
            out.append(f"{wanted}={grammar.optional[wanted].off}")
        elif name in grammar.switches:
            out.append(_switch(name, grammar.switches[name], value if equals else None, rest))
        elif name in grammar.valued:
            out += [f"{name}={value}"] if equals else [name, *_take(rest)]
        elif name in grammar.flags:
            out.append(f"{name}={value}" if equals else name)
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
            rewritten, positional = rewrite(args, _grammar(self.get_params(ctx), fields, hints))
            ctx.meta["positional"] = positional
            return super().parse_args(ctx, rewritten)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            heading = "The run"
            sections: dict[str, list[tuple[str, str]]] = {heading: []}
            for param in self.get_params(ctx):
                heading = (fields[param.name].metadata.get("group") if param.name in fields else None) or heading
                row = param.get_help_record(ctx)
                if row is not None:
                    where = "Help" if param.name in _HELP else heading
                    sections.setdefault(where, []).append(row)
            for named in ctx.meta.get("positional", []):
                env = named.partition(":")[0]
                sections[f"Settings of {env}"] = describe(env, spellings(cls))
            for title, rows in sections.items():
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=34)

    return WithSettings


def _grammar(params: Sequence[Any], fields: Mapping[str, Any], hints: Mapping[str, Any]) -> Grammar:
    valued, flags, switches, optional = set(), set(), {}, {}
    for param in params:
        if param.param_type_name != "option":
            continue
        f = fields.get(param.name)
        if f is not None and f.metadata.get("bare") is not None:
            choices = choices_of(f, hints[f.name])
            optional |= dict.fromkeys(param.opts, OptionalValue(f.metadata["bare"], f.metadata["off"], choices))
        elif param.is_flag and param.secondary_opts:
            switches |= dict.fromkeys(param.opts, param.secondary_opts[0])
            flags |= set(param.secondary_opts)
        elif param.is_flag:
            flags |= set(param.opts)
        else:
            valued |= set(param.opts)
    return Grammar(frozenset(valued), switches, frozenset(flags | {"--help"}), optional)
