"""--chat-template: another template than the model's, and values of its variables.

Both become the text of one template, which the tokenizer then has: the values are set in its first line, unless a
caller sets them. So whatever renders with this tokenizer renders alike, and so does a model folder saved with it.
Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.config.options import require

RECORDED = "chat_template.jinja"
"""Name of the file in a run or evaluation directory that holds the chat template in use."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})
"""Variables that are set for every conversation anew."""
NOTHING = '{{ "" }}'
"""Stands between the lines that are put in front of a template and the template: an expression without text, which keeps
a line break at the template's beginning that a block in front of it would remove."""


def read_parts(parts: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """(the Jinja file or None, values of template variables): those given as NAME=VALUE, in JSON or else as text.

    A file that has NAME=VALUE as its name is that file.

    Example: read_parts(["enable_thinking=false", "date_string=1 Jan 2025"]). Raises UserError.
    """
    file, values = None, {}
    for part in parts:
        name, equals, text = part.partition("=")
        if not (equals and name.isidentifier()) or os.path.isfile(part):
            require(file is None, f"--chat-template takes one file, not {file} and {part}; a variable is NAME=VALUE")
            file = part
            continue
        require(name not in RESERVED, f"--chat-template cannot set {name}, which each conversation sets itself")
        try:
            values[name] = json.loads(text, parse_constant=lambda constant: constant)
        except (ValueError, RecursionError):
            values[name] = text
    return file, values


def with_values(template: str, values: dict[str, Any]) -> str:
    """The template with defaults for some of its variables: what a caller of the template sets comes before them."""
    lines = [f"{{%- if {n} is not defined %}}{{%- set {n} = {v!r} %}}{{%- endif %}}" for n, v in values.items()]
    return "".join([*lines, NOTHING if lines else "", template])


def with_calls_as_text(template: str, form: str, marks: Sequence[str]) -> str:
    """The template without its own tool descriptions and calls, which then become text in the format `form`.

    `marks`: the tokens of its calls that the model cannot write; a comment in the template names them.
    """
    from plumbob.rollout.tool_formats import CHOSEN

    return (
        f"{{#- {CHOSEN}{form} because the model cannot write {' and '.join(marks)} -#}}"
        "{%- set tools = none %}{%- set untagged = namespace(messages=[]) %}"
        "{%- for message in messages %}"
        "{%- set untagged.messages = untagged.messages + [dict(message, tool_calls=none)] %}"
        "{%- endfor %}{%- set messages = untagged.messages %}" + NOTHING + template
    )


def marks_left_out(template: str) -> str:
    """The tokens that `with_calls_as_text` has taken out of the template, for display; "" if it did not change it."""
    from plumbob.rollout.tool_formats import CHOSEN

    comment = template.partition(CHOSEN)[2].partition("-#}")[0]
    return comment.partition("cannot write ")[2].strip()


def unchanged(template: str) -> str:
    """The template that `with_calls_as_text` was given, also if `with_values` has put lines in front of its result."""
    from plumbob.rollout.tool_formats import CHOSEN

    return template.partition(CHOSEN)[2].partition(NOTHING)[2]


def read_template(file: str) -> str:
    """The text of a chat template. Raises UserError if it cannot be read or is not valid Jinja."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file {file} (--chat-template; a variable is given as NAME=VALUE)") from None
    except OSError as error:
        raise UserError(f"cannot read {file} (--chat-template): {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} (--chat-template) is not a text in UTF-8") from None
    require(bool(text.strip()), f"{file} (--chat-template) is empty")
    from jinja2 import Environment, TemplateSyntaxError

    # transformers knows a further tag that marks what the model generates, and which changes nothing of the text.
    known = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(known)
    except TemplateSyntaxError as error:
        raise UserError(f"{file} (--chat-template) is not a Jinja template: line {error.lineno}: {error}") from None
    return text


@dataclass(frozen=True)
class TemplateChoice:
    """Which chat template a model gets. Example: `TemplateChoice(("enable_thinking=false",)).text(own)`."""

    parts: tuple[str, ...] = ()
    """Values of the template's variables, as NAME=VALUE, and a Jinja file if it is not the model's own template."""
    resumed: Path | None = None
    """The directory of a run or evaluation that is resumed: the template that it has recorded, if any, is used as it is."""

    def check(self) -> None:
        """Raise UserError for a file or an argument that cannot be used."""
        if self._recorded is None:
            file, _ = read_parts(self.parts)
            if file is not None:
                read_template(file)

    def text(self, own: str | None) -> str | None:
        """The template's text. `own`: the model's own template, None if it has none. Raises UserError."""
        if self._recorded is not None:
            return read_template(str(self._recorded))
        file, values = read_parts(self.parts)
        template = read_template(file) if file is not None else own
        return None if template is None else with_values(template, values)

    @property
    def _recorded(self) -> Path | None:
        file = self.resumed and self.resumed / RECORDED
        return file if file and file.is_file() else None


OWN = TemplateChoice()
"""The model's own template."""
