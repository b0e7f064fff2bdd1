"""What the chat template of a GRPOTrainer makes of prompts and tool calls, before the first step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from plumbob.doctor.environment.player import Task
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl.settings import tokenizer_of

REPLY = "A reply."
OPENS = "the template opens the assistant's turn"
MARKS = re.compile(r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]")
"""How templates of most models mark turns."""


def examine(trainer: Any, tasks: Sequence[Task]) -> list[Finding]:
    """What the chat template makes of a few rows' prompts; `tasks`: the rows."""
    prompt, tokenizer = tasks[0].handle.get("prompt"), tokenizer_of(trainer)
    if trainer.environment_factories is not None or not tokenizer.chat_template:
        return []
    if not isinstance(prompt, list):
        return _of_texts(tokenizer, [str(task.handle.get("prompt")) for task in tasks])
    return [
        *_of_conversation(trainer, tokenizer, prompt),
        _once(tokenizer, tasks),
        _known(tokenizer, prompt),
        _ends(trainer, tokenizer, prompt),
    ]


def _special(tokenizer: Any) -> list[str]:
    """The tokens with which a template marks turns."""
    added = [one.content for one in tokenizer.added_tokens_decoder.values() if one.special]
    return [token for token in dict.fromkeys([*added, *tokenizer.all_special_tokens]) if len(token) > 2]


def _once(tokenizer: Any, tasks: Sequence[Task]) -> Finding:
    """Whether messages are plain texts: what a template has made of them is put into it once more, if not."""
    marks = _special(tokenizer)
    found = [mark for task in tasks for mark in marks if mark in task.prompt]
    told = (
        f"{len(found)} times {found[0]!r} stands in messages" if found else f"none of {', '.join(marks[:4])} is in them"
    )
    wrong = len(found) > len(tasks) / 2
    return Finding.of("messages hold no control tokens", ("prompt-incomplete" if wrong else None, told), "rows")


def _of_texts(tokenizer: Any, texts: Sequence[str]) -> list[Finding]:
    """Prompts that are texts: plain ones, or what the template has made of a conversation, with the assistant's turn opened."""
    user = [{"role": "user", "content": REPLY}]
    closed, whole = (
        tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=open_) for open_ in (False, True)
    )
    header = whole[len(closed) :] if whole.startswith(closed) else ""
    marks = [mark for mark in _special(tokenizer) if mark in closed and mark != tokenizer.bos_token]
    rendered = [text for text in texts if any(mark in text for mark in marks)]
    shut = [text for text in rendered if header.strip() and not text.rstrip().endswith(header.strip())]
    told = f"{len(rendered)} of {len(texts)} prompts are made by a template, {len(shut)} of them end without {header!r}"
    wrong = len(shut) > len(rendered) / 2
    found = [Finding.of(OPENS, ("prompt-incomplete" if wrong else None, told), "rows")]
    start, bos = tokenizer(texts[0])["input_ids"][:2], tokenizer.bos_token_id
    twice = bos is not None and list(start) == [bos, bos]
    told = f"the first prompt begins with {tokenizer.convert_ids_to_tokens(start)}"
    return [*found, Finding.of("prompts begin once", ("prompt-incomplete" if twice else None, told), "rows")]


def _known(tokenizer: Any, prompt: Any) -> Finding:
    """Whether the template's marks are tokens of this tokenizer: those of another model are read as common text."""
    whole = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    said = "".join(_contents(prompt))
    marks = [mark for mark in dict.fromkeys(MARKS.findall(whole)) if mark not in said]
    parts = {mark: len(tokenizer(mark, add_special_tokens=False)["input_ids"]) for mark in marks}
    lost = [mark for mark, count in parts.items() if count > 1]
    told = f"{lost[0]!r} is {parts[lost[0]]} tokens" if lost else f"{len(marks)} marks are a token each"
    return Finding.of(
        "the template's marks are tokens of the model", ("prompt-incomplete" if lost else None, told), "rows"
    )


def _ends(trainer: Any, tokenizer: Any, prompt: Any) -> Finding:
    """Whether generation stops at the token with which the template ends the assistant's turn."""
    check, said = "generation stops where the template ends a turn", [*prompt, {"role": "assistant", "content": REPLY}]
    after = tokenizer.apply_chat_template(said, tokenize=False).rpartition(REPLY)[2]
    mark = re.match(r"\s*(<[^<>\s]+>)", after)
    ids = tokenizer(mark[1], add_special_tokens=False)["input_ids"] if mark else []
    stops = [tokenizer.decode([one]) for one in trainer.eos_token_ids]
    told = f"turns end with {mark[1] if mark else after!r}, generation with {', '.join(map(repr, stops))}"
    wrong = len(ids) == 1 and ids[0] not in trainer.eos_token_ids
    return Finding.of(check, ("stop-token-wrong" if wrong else None, told), "sampling")


def _contents(prompt: Any) -> list[str]:
    return [text for text in (m.get("content") for m in prompt) if isinstance(text, str)]


def _of_conversation(trainer: Any, tokenizer: Any, prompt: Any) -> list[Finding]:
    """What the chat template makes of the first row's prompt."""
    from transformers.utils import get_json_schema

    tools = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in trainer.tools or ()] or None
    found, names = [], [str(tool["function"]["name"]) for tool in tools or ()]
    whole, closed = (
        tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=open_)
        for open_ in (True, False)
    )
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", whole)]
    lacks = "prompt-incomplete"
    if tools:
        told = (
            f"the template's prompt does not name {', '.join(missing)}" if missing else f"it names {', '.join(names)}"
        )
        found.append(Finding.of("prompts describe the tools", (lacks if missing else None, told), "rows"))
    texts = [(m["role"], m.get("content")) for m in prompt if m["role"] in ("system", "user")]
    lost = [role for role, text in texts if isinstance(text, str) and not _holds(whole, text)]
    told = f"messages of {', '.join(dict.fromkeys(lost))} are not in it" if lost else f"{len(texts)} messages are in it"
    found.append(Finding.of("prompts hold what the messages say", (lacks if lost else None, told), "rows"))
    reply = tokenizer.apply_chat_template(
        [*prompt, {"role": "assistant", "content": REPLY}], tools=tools, tokenize=False
    )
    header = reply.partition(REPLY)[0].removeprefix(closed) if reply.startswith(closed) else ""
    opens = whole != closed or not header.strip()  # some templates need no header
    told = f"the prompt ends with {whole[-40:]!r}; a turn begins with {header!r}"
    found.append(Finding.of(OPENS, (None if opens else lacks, told), "rows"))
    if tools:
        found.append(_call(trainer, tokenizer, prompt, tools))
    return found


def _holds(whole: str, text: str) -> bool:
    """Whether a text stands in another one, white space aside, at least as it begins."""
    return "".join(text.split())[:60] in "".join(whole.split())


def _call(trainer: Any, tokenizer: Any, prompt: Any, tools: list[Any]) -> Finding:
    """A tool call as the template writes it is read as the same call."""
    from trl.chat_template_utils import parse_response

    check, tool = "a tool call in the template's form is read as that call", tools[0]["function"]
    arguments = {
        name: "a" for name, of in tool["parameters"].get("properties", {}).items() if of.get("type") == "string"
    }
    call = {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    said = [*prompt, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        start = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(said, tools=tools, tokenize=False)
        if not text.startswith(start):
            return Finding(check, "unsure", "the template writes earlier turns otherwise", None, "tools")
        ids, prefix = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[len(start) :], start))
        read = parse_response(trainer._tokenizer, ids, prefix=prefix, tools=tools).get("tool_calls") or []
    except Exception as error:  # templates and parsers raise what they like
        return Finding(check, "unsure", f"{type(error).__name__}: {error}", None, "tools")
    same = [(one["function"]["name"], one["function"]["arguments"]) for one in read] == [(tool["name"], arguments)]
    told = f"of {text[len(start) :].strip()[:80]!r} {'it' if same else 'no such call'} is read"
    return Finding.of(check, (None if same else "calls-not-read", told), "tools")
