"""Requests that concern a server itself: what it is, and one request to all servers at once. Plain code, no event loop."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from plumbob.hub import UserError
from plumbob.trainer.sync import SyncError
from plumbob.trainer.vllm.http import HttpThread, ServerFailure, advice

CHECKED_TEXT = (
    '<|im_start|>user\nWhat is 17 × 3.5?<|im_end|>\n<tool_call>\n{"name": "look_up"}\n</tool_call>\tÉté 日本語'
)
"""Has what tokenizers differ in: special tokens, digits, spaces, punctuation, other scripts."""

CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself."""

    url: str
    version: tuple[int, int]
    """vLLM's, major and minor; (0, 0) if it does not say."""
    max_length: int
    """Tokens of prompt and completion together."""


class Control:
    """The same request to every server, concurrently.

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
        seconds: float | None = None,
        read: Callable[[bytes], Any] = bytes,
    ) -> list[Any]:
        """The answers in the order of the servers. Raises SyncError with the first failure, when all have answered."""
        request = partial(self.http.request, method, path=path, body=body, params=params, seconds=seconds, read=read)

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(request(url) for url in self.urls), return_exceptions=True)

        answers = self.http.result(everywhere())
        for answer in answers:
            if isinstance(answer, ServerFailure):
                told = f"{answer}; {advice(answer)}" if answer.gone or answer.status == 408 else str(answer)
                raise SyncError(told) from None
            if isinstance(answer, BaseException):
                raise answer
        return answers


def check_server(http: HttpThread, url: str, model: str, vocab_size: int, tokenizer: Any = None) -> ServerInfo:
    """Ask a server what it is. Raises UserError if there is none, or it cannot be used to train this model.

    `vocab_size`: of the policy. The server has to take id vocab_size - 1 and refuse the next one, and to tokenise as
    `tokenizer` does.
    """

    def ask(method: str, path: str, body: Any = None) -> Any:
        return http.result(http.request(method, url, path, body, seconds=CONNECT_SECONDS))

    try:
        cards = {str(card["id"]): card for card in ask("GET", "/v1/models")["data"]}
    except ServerFailure as failure:
        hint = f"start one with `vf-vllm --model {model}`, or correct --vllm-url" if failure.gone else "see its log"
        raise UserError(f"{failure}; {hint}") from None
    except (KeyError, TypeError):
        raise UserError(f"{url} answers, but not as a vLLM server") from None
    if model not in cards:
        served = ", ".join(name for name, card in cards.items() if not card.get("parent"))
        raise UserError(
            f"the vLLM server at {url} serves {served}, and {model} is to be trained; start it with that --model"
        )
    draws = partial(_draws, ask, model)
    try:
        draws([0], logprobs=0)
    except ServerFailure as failure:
        raise UserError(f"{failure}; start it with vf-vllm, which switches on what the trainer needs") from None
    _check_vocabulary(url, draws, vocab_size, tokenizer)
    _check_tokenizer(url, ask, model, tokenizer)
    # Of one likeliest token the distribution that is drawn from has log-probability 0, and the model's own has less. Several
    # prompts, because two tokens that are equally likely both stay, and rounded to bfloat16 some are.
    prompts = [[vocab_size * i // 8] for i in range(8)]
    drawn = [draws(ids, logprobs=0, top_k=1)["logprobs"]["content"][0]["logprob"] for ids in prompts]
    if (logprob := statistics.median_high(drawn)) < -1e-3:
        raise UserError(
            f"the vLLM server at {url} gives log-probabilities of another distribution than it samples from ({logprob:.3g} "
            "for a token that was certain); start it with vf-vllm, or with --logprobs-mode processed_logprobs"
        )
    return ServerInfo(url, _version(ask), int(cards[model].get("max_model_len") or 0))


def _draws(ask: Callable[..., Any], model: str, token_ids: Sequence[int], **params: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 1, "temperature": 1.0, "ignore_eos": True, **params}
    body = {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}
    return ask("POST", "/inference/v1/generate", body)["choices"][0]


def _check_vocabulary(url: str, draws: Callable[..., Any], vocab_size: int, tokenizer: Any) -> None:
    wrong = f"the vLLM server at {url} serves a model with another vocabulary than the trained one's {vocab_size} ids"
    try:
        draws([vocab_size - 1])
    except ServerFailure as failure:
        raise UserError(f"{wrong} ({failure.reason}); start it with the same --model") from None
    # vLLM takes an id that either its model or its tokenizer has.
    beyond = max(vocab_size, len(tokenizer) if tokenizer is not None else 0)
    try:
        draws([beyond])
    except ServerFailure as failure:
        if failure.status != 400:
            raise UserError(f"{failure}; see its log") from None
        return
    raise UserError(f"{wrong}: it takes id {beyond}; start it with the same --model")


def _check_tokenizer(url: str, ask: Callable[..., Any], model: str, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    body = {"model": model, "prompt": CHECKED_TEXT, "add_special_tokens": False}
    try:
        served = ask("POST", "/tokenize", body)["tokens"]
    except (ServerFailure, KeyError, TypeError):
        return  # a server that tokenises nothing cannot tokenise otherwise; ids go in and out
    own = tokenizer.encode(CHECKED_TEXT, add_special_tokens=False)
    if served != own:
        at = next((i for i, (a, b) in enumerate(zip(served, own, strict=False)) if a != b), min(len(served), len(own)))
        raise UserError(
            f"the vLLM server at {url} has another tokenizer than the trained model's: they differ from token {at} of a fixed "
            "text on; start it with the same --model"
        )


def _version(ask: Callable[..., Any]) -> tuple[int, int]:
    try:
        found = re.match(r"(\d+)\.(\d+)", str(ask("GET", "/version")["version"]))
    except (ServerFailure, KeyError, TypeError):
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)
