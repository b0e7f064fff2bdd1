"""`serve`: a model behind an OpenAI-compatible HTTP server. torch and verifiers load only when work begins."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.console.help import Command
from plumbob.console.version import version_option
from plumbob.trainer.config.chat_template import TemplateChoice
from plumbob.trainer.config.rollout_options import TOOL_FORMATS, ToolFormatName
from plumbob.trainer.run_files.model_path import check_model_exists

if TYPE_CHECKING:
    from plumbob.trainer.serving.server import Server

app = typer.Typer(rich_markup_mode=None)


@app.command(cls=Command)
def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Model with a chat template: a folder, a Hugging Face hub name, or a bundled model such as tiny.",
        ),
    ] = "tiny",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts requests from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Maximum number of completions sampled at the same time; further ones wait.")
    ] = 64,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum number of tokens of a prompt and its completion together.",
            show_default="4096, or the model's maximum if that is smaller",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            help="Jinja file with the chat template to use in place of the model's own.",
            metavar="FILE",
        ),
    ] = None,
    chat_template_args: Annotated[
        list[str] | None,
        typer.Option(
            "--chat-template-args",
            help="Value of a variable of the chat template, as NAME=VALUE with VALUE in JSON or as text, such as "
            "enable_thinking=false; may be repeated. A request's chat_template_kwargs come before it.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    tool_format: Annotated[
        ToolFormatName | None,
        typer.Option(
            help=TOOL_FORMATS,
            show_default="chosen from the chat template",
        ),
    ] = None,
    bf16: Annotated[bool, typer.Option(help="Generate in bfloat16.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name under which clients may ask for this server, besides localhost, IP addresses and --host, and "
            "whose web pages may use it; may be repeated; '*' for any.",
            metavar="NAME",
        ),
    ] = None,
    version: Annotated[bool | None, version_option("plumbob-trainer")] = None,
) -> int:
    """Serve a model with OpenAI's chat completions API over HTTP, until Ctrl-C.

    Routes: /v1/chat/completions, /v1/models, /inference/v1/generate (token ids in and out), /health.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    template = TemplateChoice(chat_template, tuple(chat_template_args or ()))
    template.check()
    check_model_exists(model)
    _check_address(host, port)
    for name in allow_host or ():
        if not re.fullmatch(r"\*|[\w.-]+", name):
            raise UserError(
                f"--allow-host {name!r} is not a host name; give a name such as gpu-box, without scheme and port"
            )
    with contextlib.suppress(KeyboardInterrupt):
        load = functools.partial(
            _load,
            model,
            max_concurrent=max_concurrent,
            max_context=max_context,
            bf16=bf16,
            template=template,
            tool_format=tool_format,
            hosts=[host, *(allow_host or ())],
        )
        asyncio.run(_serve(model, host, port, load))
    return 0


def _load(model: str, **settings: Any) -> Server:
    from plumbob.trainer.serving.server import load_server

    return load_server(model, **settings)


async def _serve(model: str, host: str, port: int, load: Callable[[], Server]) -> None:
    from plumbob.trainer.rollouts.templates import QUESTION, unread_form
    from plumbob.trainer.serving.server import running

    server = load()
    if unread := unread_form(server.chat, [QUESTION]):
        print(f"the chat template of {model} {unread}", file=sys.stderr)
    if not server.chat.names_tools([QUESTION]):
        print(f"the chat template of {model} has no place for tools: they are described in text", file=sys.stderr)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        async with running(server, host, port) as url:
            print(f"serving {model} at {url}/v1; stop with Ctrl-C. To try it, run in another terminal:", flush=True)
            print(
                f"  vf-eval vf_lookup -m {model} --client.base-url {url}/v1 --client.api-key-var NO_KEY -n 4 --no-push",
                flush=True,
            )
            await stopped.wait()
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    print("stopped", file=sys.stderr)


def _check_address(host: str, port: int) -> None:
    """Raise UserError if the server could not listen there, before a model is loaded for it."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    except UnicodeError:
        raise UserError(f"--host {host!r} is not a host name or an address") from None


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    errno = error.errno or 0
    reason = os.strerror(errno) if errno > 0 else error.strerror  # a host name that is not found has no errno
    return UserError(f"cannot listen on {host}:{port}: {reason}; try --port 0")


def main() -> None:
    run_app("serve", app)
