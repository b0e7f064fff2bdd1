"""Synchronous requests about a server itself: check what it serves, and send one request to all servers at once."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.inference import generate_api
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.inference.http_client import HttpThread, ServerFailure, Timing, advice
from plumbob.trainer.inference.token_servers import root_url

CONNECT_SECONDS = 30.0
"""Time limit of each request with which a server is checked."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server reports about itself."""

    url: str
    version: tuple[int, int]
    """vLLM's version, major and minor; (0, 0) if the server does not say."""
    max_length: int
    """Most tokens of prompt and completion together; 0 if the server does not say."""
    max_lora_rank: int
    """Largest rank of an adapter that the server takes; 0 if it takes none."""
    transfer: str
    """How the server takes all weights: nccl, ipc or disk."""


class Control:
    """Sends the same request to every server, concurrently, from synchronous code.

    Example: `control.each("POST", "/pause", params={"mode": "wait"})`.
    """

    def __init__(self, http: HttpThread, urls: Sequence[str]) -> None:
        self.http, self.urls = http, list(urls)

    def each(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        read: Callable[[bytes], Any] = bytes,
    ) -> list[Any]:
        """Send a request to every server; returns the answers in the order of the servers.

        Waits for all servers, then raises SyncError for the first of them that failed.
        """
        request = partial(self.http.request, method, path=path, body=body, params=params, read=read)

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(request(url) for url in self.urls), return_exceptions=True)

        answers = self.http.result(everywhere())
        for answer in answers:
            if isinstance(answer, ServerFailure):
                message = f"{answer}; {advice(answer)}" if answer.gone or answer.status == 408 else str(answer)
                raise SyncError(message, answer.status, answer.reason) from None
            if isinstance(answer, BaseException):
                raise answer
        return answers


def check_served(urls: Sequence[str], model: str) -> None:
    """Raise UserError if there is no server at one of these URLs, or if it has another model: before anything is loaded."""
    with closing(HttpThread(Timing(), os.environ.get("OPENAI_API_KEY"))) as http:
        for url in urls:
            _card(http, root_url(url), model)


def _card(http: HttpThread, url: str, model: str) -> dict[str, Any]:
    """What the server at `url` says about the model. Raises UserError if it does not answer, or lacks the model."""
    try:
        answer = http.result(http.request("GET", url, "/v1/models", seconds=CONNECT_SECONDS))
        cards = {str(card["id"]): card for card in answer["data"]}
    except ServerFailure as failure:
        hint = f"start one with `vf-vllm --model {model}`, or correct --vllm-url" if failure.gone else "see its log"
        raise UserError(f"{failure}; {hint}") from None
    except (KeyError, TypeError):
        raise UserError(f"{url} answers, but not as a vLLM server; correct --vllm-url") from None
    if model not in cards:
        served = ", ".join(name for name, card in cards.items() if not card.get("parent"))
        raise UserError(
            f"the vLLM server at {url} serves {served}, not the model to train; start it with --model {model}"
        )
    return cards[model]


def check_server(http: HttpThread, url: str, model: str, vocab_size: int) -> ServerInfo:
    """Check that the server at `url` can be used to train `model`. Raises UserError if there is none or it cannot.

    `vocab_size`: number of the policy's token ids. The server must say that its model has as many. Nothing is asked that
    could harm a server: vLLM accepts ids that its tokenizer has and its model lacks, and one of them ends the whole server
    (an assertion on the GPU).
    """

    def ask(method: str, path: str, body: Any = None) -> Any:
        return http.result(http.request(method, url, path, body, seconds=CONNECT_SECONDS))

    card = _card(http, url, model)
    sample = partial(_sample, ask, model)
    try:
        sample([0], logprobs=0)
    except ServerFailure as failure:
        raise UserError(
            f"{failure}; start the server with vf-vllm, which enables the endpoints that the trainer needs"
        ) from None
    told = _ask_model(url, ask)
    if told["vocab_size"] != vocab_size:
        raise UserError(
            f"the vLLM server at {url} serves a model with {told['vocab_size']} token ids, and the trained model has "
            f"{vocab_size}; start it with the same --model"
        )
    # With top_k=1 the sampled token has log-probability 0 under the truncated distribution, and less under the model's
    # own. The median over several prompts is used, because top_k=1 keeps two tokens if their logits are equal, as some
    # are in bfloat16.
    prompts = [[vocab_size * i // 8] for i in range(8)]
    logprobs = [sample(ids, logprobs=0, top_k=1)["logprobs"]["content"][0]["logprob"] for ids in prompts]
    if (logprob := statistics.median_high(logprobs)) < -1e-3:
        raise UserError(
            f"the vLLM server at {url} returns log-probabilities of another distribution than it samples from ({logprob:.3g} "
            "for a token of probability 1); start it with vf-vllm, or with --logprobs-mode processed_logprobs"
        )
    max_length = int(card.get("max_model_len") or 0)
    return ServerInfo(url, _version(ask), max_length, int(told["max_lora_rank"]), str(told.get("transfer", "disk")))


def _sample(ask: Callable[..., Any], model: str, token_ids: Sequence[int], **params: Any) -> dict[str, Any]:
    """The server's first choice for a completion of one token."""
    sampling = {**generate_api.STATED, "max_tokens": 1, **params}
    body = {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}
    return ask("POST", "/inference/v1/generate", body)["choices"][0]


def _ask_model(url: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """What the server's worker says about its model. Raises UserError if it cannot be asked."""
    try:
        return ask("POST", "/collective_rpc", {"method": "plumbob_model"})["results"][0]
    except (ServerFailure, KeyError, TypeError, IndexError):
        raise UserError(
            f"the vLLM server at {url} cannot be asked how many token ids its model has, and an id beyond them would end "
            "it; start the server with this version's vf-vllm, without --no-dev-endpoints"
        ) from None


def _version(ask: Callable[..., Any]) -> tuple[int, int]:
    try:
        found = re.match(r"(\d+)\.(\d+)", str(ask("GET", "/version")["version"]))
    except (ServerFailure, KeyError, TypeError):
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)
