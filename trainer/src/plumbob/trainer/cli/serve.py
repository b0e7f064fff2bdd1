"""`serve`: a model behind an OpenAI-compatible HTTP server. torch and verifiers load only when work begins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Annotated, Any

import typer
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.console.help import Command
from plumbob.console.version import version_option
from plumbob.console.working import Working
from plumbob.trainer.cli.loading import fast_imports
from plumbob.trainer.config.chat_template import TemplateChoice
from plumbob.trainer.config.options import as_command, resolve
from plumbob.trainer.config.serve import ServeConfig
from plumbob.trainer.run_files.model_path import check_model_exists

app = typer.Typer(rich_markup_mode=None)


def serve(**given: Any) -> int:
    """Serve a model with OpenAI's chat completions API over HTTP, until Ctrl-C.

    Routes: /v1/chat/completions, /v1/models, /inference/v1/generate (token ids in and out), /health.
    """
    config, _ = resolve(ServeConfig, given, (), kind="server", directory_is="")
    template = TemplateChoice(config.chat_template)
    template.check()
    check_model_exists(config.model)
    _check_address(config.host, config.port)
    with contextlib.suppress(KeyboardInterrupt):
        with fast_imports(f"torch and {config.model}"):
            import plumbob.trainer.rollouts.templates
            import plumbob.trainer.serving.server  # noqa: F401 - what `_serve` imports
        asyncio.run(_serve(config, template))
    return 0


async def _serve(config: ServeConfig, template: TemplateChoice) -> None:
    from plumbob.trainer.rollouts.templates import QUESTION, unread_form
    from plumbob.trainer.serving.server import load_server, running

    model, host, port = config.model, config.host, config.port
    with Working(f"loading {model}"):
        server = load_server(
            model,
            max_concurrent=config.max_concurrent,
            max_context=config.max_context,
            bf16=config.bf16,
            template=template,
            tool_format=config.tool_format,
            hosts=(host, *config.allow_host),
        )
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


app.command(help=serve.__doc__, cls=Command)(
    as_command(serve, {"version": Annotated[bool | None, version_option("plumbob-trainer")]}, ServeConfig)
)


def main() -> None:
    run_app("serve", app)
