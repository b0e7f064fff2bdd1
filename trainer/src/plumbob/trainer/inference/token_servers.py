"""Completions by token ids from one or several HTTP servers of one model: vLLM's, or those of `serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from plumbob.console import UserError
from plumbob.rollout import Completion, Sampling
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.inference import generate_api
from plumbob.trainer.inference.http_client import HttpThread, ServerFailure, Timing
from plumbob.trainer.inference.server_pool import Server, ServerPool


@dataclass(frozen=True)
class Served:
    """What requests ask for at this moment."""

    version: int
    """The policy version."""
    model: str
    """The base model's name, or that of the newest adapter."""


class TokenServers:
    """A rollout engine over HTTP: `generate` sends each request to the server that serves it best, and tries again.

    Example: `TokenServers(HttpThread(Timing()), ["http://127.0.0.1:8000"], "tiny")`.
    """

    def __init__(self, http: HttpThread, urls: Sequence[str], model: str, *, seeds: bool = True) -> None:
        """`urls`: as `root_url` returns them. `seeds`: send each completion's seed (`generate_api.sampling_params`)."""
        self.http, self.base_model, self.seeds = http, model, seeds
        self.pool = ServerPool(http, urls)
        self.served = Served(0, model)
        self.in_flight = 0
        self.generated_tokens = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion. It names the policy version that it was asked for, whatever is synced meanwhile.

        Raises EngineError if no server answers in time.
        """
        served = self.served
        body = {
            "model": served.model,
            "token_ids": list(prompt_ids),
            "sampling_params": generate_api.sampling_params(sampling, seeded=self.seeds),
        }
        read = partial(generate_api.read_completion, version=served.version, greedy=sampling.temperature == 0)
        self.in_flight += 1
        try:
            send = partial(self._send, body=body, read=read)
            completion = await self.http.awaited(self.pool.ask(prompt_ids, send))
        finally:
            self.in_flight -= 1
        self.generated_tokens += len(completion.token_ids)
        return completion

    async def _send(self, server: Server, seconds: float, *, body: dict[str, Any], read: Any) -> Completion:
        """One attempt at one server. Raises ServerFailure and EngineError."""
        try:
            return await self.http.request(
                "POST", server.url, generate_api.PATH, body, seconds=seconds, read=read, pooled=True
            )
        except generate_api.Aborted:
            raise ServerFailure(server.url, 503, "ended a completion before it was complete") from None
        except ServerFailure as failure:
            if failure.status == 404 and body["model"] != self.base_model:
                # The server has restarted and lost the adapter: load it again, then repeat the request.
                server.doubted = True
                raise ServerFailure(server.url, 503, failure.reason) from None
            raise


def root_url(url: str, option: str = "--vllm-url") -> str:
    """A server's URL without a slash or /v1 at its end. Raises UserError, naming `option`, if `url` is not a URL."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port  # which is read now
    except ValueError:  # such as half an IPv6 address, or a port that is no number
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{option} {url!r} is not the URL of a server; give one like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


PATIENCE_SECONDS = 30.0
"""How long a request of an evaluation is retried while its server is overloaded or unreachable."""


def connection(config: EvaluateConfig) -> HttpThread:
    """What asks the server of `--base-url`. The caller closes it."""
    seconds = config.max_seconds
    timing = Timing(request=seconds, total=seconds, patience=min(PATIENCE_SECONDS, seconds))
    return HttpThread(timing, os.environ.get(config.api_key_var))


def check_server(config: EvaluateConfig) -> None:
    """`check_model` before anything is loaded."""
    with closing(connection(config)) as http:
        check_model(http, root_url(config.base_url, "--base-url"), config)


def check_model(http: HttpThread, url: str, config: EvaluateConfig) -> None:
    """Ask the server which models it has.

    Raises UserError if no server answers, it refuses the key, or it lacks the model.
    """
    try:
        names = http.result(http.request("GET", url, "/v1/models", seconds=http.timing.connect, read=_model_names))
    except ServerFailure as failure:
        if failure.gone or failure.status == 408:
            raise UserError(
                f"no server answers at {config.base_url} ({failure.reason}); start one, for example "
                f"`serve --model {config.model}`, or give the server's --base-url"
            ) from None
        if failure.status in (401, 403):
            raise UserError(
                f"the server at {config.base_url} refuses the API key in ${config.api_key_var} (status "
                f"{failure.status}); set another one"
            ) from None
        if failure.status == 200:
            raise UserError(
                f"{config.base_url} answers, but not as an OpenAI-compatible server; give a --base-url that ends in /v1"
            ) from None
        return  # /v1/models is optional
    if names and config.model not in names:
        raise UserError(f"the server at {config.base_url} has no model {config.model!r}; it has {', '.join(names)}")


def _model_names(content: bytes) -> list[str]:
    return [str(card["id"]) for card in json.loads(content)["data"]]
