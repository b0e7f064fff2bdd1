"""The forms in which families of models write tool calls, by name and by chat template."""

from __future__ import annotations

from plumbob.rollout.tool_formats import hermes, llama3, mistral, pythonic, qwen_coder, qwen_xml
from plumbob.rollout.tool_formats.base import MAX_CALLS, Format, ToolFormat, Tools, tools_of

_UNMISTAKABLE = (qwen_xml.find, hermes.find, mistral.find, qwen_coder.find, pythonic.find)
"""Forms that are calls whatever the model. Tags stand first, because in a reply with tags they are the calls."""

_FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        Format("auto", hermes.find, hermes.write, _UNMISTAKABLE),
        Format("hermes", hermes.find, hermes.write, _UNMISTAKABLE),
        Format("llama3", llama3.find, llama3.write, _UNMISTAKABLE),
        Format("mistral", mistral.find, mistral.write, _UNMISTAKABLE),
        Format("pythonic", pythonic.find_whole, pythonic.write, _UNMISTAKABLE),
        Format("qwen-coder", qwen_coder.find, qwen_coder.write, _UNMISTAKABLE),
        Format("qwen-xml", qwen_xml.find, qwen_xml.write, _UNMISTAKABLE),
    )
}

NAMES: tuple[str, ...] = tuple(_FORMATS)
"""The values of `--tool-format`."""

_MARKERS = (
    ("<function=", "qwen-xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[AVAILABLE_TOOLS]", "mistral"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|header_start|>", "pythonic"),
    ("<|start_header_id|>", "llama3"),
)
"""Texts of chat templates, each with the format of its models. The first that occurs decides."""

AS_TEXT = "qwen-coder"
"""The format whose calls are ordinary text, without control tokens, for models that cannot write their template's."""
CHOSEN = "plumbob: --tool-format "
"""Stands before a format's name in the comment of a chat template that was changed for it."""


def named(name: str) -> ToolFormat:
    """The format of this name. Raises ValueError, which names the choices."""
    if name not in _FORMATS:
        raise ValueError(f"there is no tool format {name!r}; the formats are: {', '.join(NAMES)}")
    return _FORMATS[name]


def detect(chat_template: str) -> ToolFormat:
    """The format of the models that a chat template belongs to, by the template's own text.

    A template that names no form gets "auto", which writes calls as hermes does.
    """
    _, chosen, rest = chat_template.partition(CHOSEN)
    if chosen:
        return named(rest.split()[0])
    return named(next((name for marker, name in _MARKERS if marker in chat_template), "auto"))


__all__ = ["AS_TEXT", "CHOSEN", "MAX_CALLS", "NAMES", "ToolFormat", "Tools", "detect", "named", "tools_of"]
