"""Completions from vLLM servers, as `TransformersEngine` gives them from the process: the trainer's engine behind HTTP."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from plumbob.hub import UserError
from plumbob.rollout import Completion, EngineError, Sampling
from plumbob.trainer import generate_route
from plumbob.trainer.engine import PromptError, check_ids
from plumbob.trainer.sync import WRONG_WEIGHTS, SyncError
from plumbob.trainer.vllm.adapters import AdapterTransfer, LoraShape, Pushed
from plumbob.trainer.vllm.control import Control, check_server
from plumbob.trainer.vllm.http import HttpThread, ServerFailure, Timing
from plumbob.trainer.vllm.pool import Server, ServerPool, Unusable
from plumbob.trainer.vllm.serve import Sync
from plumbob.trainer.vllm.weights import DiskMover, IpcMover, Mover, NcclMover, WeightTransfer

NO_LOGPROB = -9999.0
"""What vLLM writes where it has no log-probability."""


@dataclass(frozen=True)
class VllmSettings:
    """Where the servers are and how trained weights reach them.

    Example: `VllmSettings(("http://127.0.0.1:8000",), "tiny", vocab_size=640, lora=LoraShape(16, 32))`.
    """

    urls: tuple[str, ...]
    model: str
    """The name that the servers give the model."""
    vocab_size: int
    sync: Sync = "lora"
    lora: LoraShape | None = None
    """Needed where `sync` is "lora"."""
    dtype: torch.dtype = torch.bfloat16
    """Of the weights in the servers."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of the trained weights."""
    folder: Path | None = None
    """Where adapters and weights are written for the servers; by default memory, if all servers are on this machine."""
    seeds: bool = False
    """Send each completion's seed. vLLM then draws request by request, which is slower, and is not exact to the bit."""
    api_key_var: str = "OPENAI_API_KEY"
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Served:
    """What requests get. Rank 0 syncs; the other ranks `adopt` its value."""

    version: int
    model: str
    """The name that they ask for: the base model's, or the newest adapter's."""


class VllmEngine:
    """An `Engine` over one or several vLLM servers of one model, whose weights change only through `update`."""

    def __init__(self, settings: VllmSettings, tokenizer: Any = None) -> None:
        """Raises UserError if a server cannot be reached, or serves another model, or not as the trainer needs it."""
        self.settings = settings
        self.dtype = settings.dtype
        self.vocab_size = settings.vocab_size
        self.in_flight = 0
        self.generated_tokens = 0
        self.last_sync: SyncCost | None = None
        self._served = Served(0, settings.model)
        urls = [_root(url) for url in settings.urls]
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"--vllm-url names {'a server twice' if urls else 'no server'}")
        self._http = HttpThread(settings.timing, os.environ.get(settings.api_key_var))
        try:
            infos = [check_server(self._http, u, settings.model, settings.vocab_size, tokenizer) for u in urls]
            self.max_length = min(info.max_length for info in infos) or 1 << 30
            self._control = Control(self._http, urls)
            self._pool = ServerPool(self._http, urls)
            self._pool.readmit = self._readmit
            self._folder = _exchange_folder(settings.folder, urls)
            self._transfer = self._make_transfer(min(info.version for info in infos))
        except BaseException:
            self._http.close()
            raise

    @property
    def version(self) -> int:
        return self._served.version

    @version.setter
    def version(self, version: int) -> None:
        """For a resumed run, whose versions go on where they were; the next `update` sends the weights."""
        self._served = Served(version, self._served.model)

    @property
    def served(self) -> Served:
        return self._served

    def adopt(self, served: Served) -> None:
        """Ask for what another process has synced."""
        self._served = served

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Draw one completion. It names the policy version that it was drawn under, whatever is synced meanwhile.

        Raises PromptError for a prompt that the model cannot take, and EngineError if no server draws it in time.
        """
        check_ids(prompt_ids, self.vocab_size)
        if len(prompt_ids) + sampling.max_tokens > self.max_length:
            raise PromptError(
                f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones exceed the servers' {self.max_length}; "
                "start vf-vllm with a larger --max-model-len"
            )
        served = self._served
        body = {
            "model": served.model,
            "token_ids": list(prompt_ids),
            "sampling_params": sampling_params(sampling, seeded=self.settings.seeds),
        }
        read = partial(read_completion, version=served.version, greedy=sampling.temperature == 0)
        self.in_flight += 1
        try:
            send = partial(self._send, body=body, read=read)
            completion = await self._http.awaited(self._pool.ask(prompt_ids, send))
        finally:
            self.in_flight -= 1
        self.generated_tokens += len(completion.token_ids)
        return completion

    def update(self, weights: Mapping[str, torch.Tensor], *, in_flight: Literal["refuse", "finish"] = "refuse") -> int:
        """Have every server take the trained weights, and return the new policy version.

        `weights`: the adapter's, by peft's names, or all of the model's. With `in_flight="finish"`, which adapters allow,
        completions under way end with the adapter that they began with. Raises EngineError if there are any otherwise, and
        SyncError if a server does not take the weights: the old ones are then served, or with all weights nothing sure.
        """
        if self.in_flight and (in_flight == "refuse" or self.settings.sync != "lora"):
            raise EngineError(f"weights cannot change while {self.in_flight} completions are being drawn")
        start, version = time.perf_counter(), self.version + 1
        pushed = self._transfer.push(weights, version)
        self._served = Served(version, pushed.model)
        self._pool.trust_all()
        if not self.in_flight:
            self._settle()
        self.last_sync = SyncCost(time.perf_counter() - start, pushed)
        return version

    def _settle(self) -> None:
        """Forget the old adapter, and the keys and values of old weights."""
        if isinstance(self._transfer, AdapterTransfer):
            self._transfer.settle()
        try:
            answers = self._control.each("POST", "/reset_prefix_cache")
        except SyncError:
            # vLLM files an adapter's keys and values under its name: there it only frees memory.
            if isinstance(self._transfer, WeightTransfer):
                raise
            return
        if isinstance(self._transfer, WeightTransfer) and any(b"false" in answer for answer in answers):
            raise SyncError("a vLLM server still holds keys and values of the old weights: something else uses it")

    def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each id but the first given the ids before it, [T - 1], from the first server."""
        if temperature != 1.0:
            raise ValueError("vLLM scores prompts at temperature 1 only")
        return self.score_everywhere(token_ids)[self._control.urls[0]]

    def score_everywhere(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """What `score` gives, from every server by its URL. Raises EngineError."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        body = {"model": self._served.model, "token_ids": list(token_ids), "sampling_params": sampling}
        read = partial(read_prompt_logprobs, token_ids=token_ids)
        try:
            scores = self._control.each("POST", "/inference/v1/generate", body, read=read)
        except SyncError as error:
            raise EngineError(f"the served weights cannot be checked: {error}") from None
        return dict(zip(self._control.urls, scores, strict=True))

    def check_parity(self, token_ids: Sequence[int], logprobs: Sequence[float], limit: float) -> float:
        """The largest mean difference, in nats, between the trainer's log-probabilities [T - 1] and any server's.

        Raises SyncError beyond `limit`, naming the server.
        """
        worst = 0.0
        for url, served in self.score_everywhere(token_ids).items():
            parity = sum(abs(a - b) for a, b in zip(served, logprobs, strict=True)) / len(served)
            if not parity <= limit:
                raise SyncError(
                    f"after sync {self.version} the log-probabilities of the vLLM server at {url} differ from the trainer's "
                    f"by {parity:.2g} nats on average (limit {limit:g}): {WRONG_WEIGHTS}"
                )
            worst = max(worst, parity)
        return worst

    def forget(self) -> None:
        """Nothing to do: what servers cache depends on the weights alone, and they draw as they like anyway."""

    def sleep(self) -> None:
        """Give the servers' GPU memory to the trainer (level 1: weights wait in main memory, caches are dropped)."""
        if self.in_flight:
            raise EngineError(f"the servers cannot sleep while {self.in_flight} completions are being drawn")
        self._control.each("POST", "/sleep", params={"level": "1", "mode": "wait"})

    def wake_up(self) -> None:
        self._control.each("POST", "/wake_up")

    def close(self) -> None:
        """Unload what was loaded, delete what was written. The servers go on."""
        try:
            self._transfer.close()
        finally:
            self._http.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, server: Server, seconds: float, *, body: dict[str, Any], read: Any) -> Completion:
        """One attempt at one server. Raises ServerFailure and EngineError."""
        try:
            return await self._http.request(
                "POST", server.url, "/inference/v1/generate", body, seconds=seconds, read=read, pooled=True
            )
        except Aborted:
            raise ServerFailure(server.url, 503, "broke a completion off") from None
        except ServerFailure as failure:
            if failure.status == 404 and body["model"] != self.settings.model:
                # It was started again without anybody noticing; it gets the adapter and another try.
                server.doubted = True
                raise ServerFailure(server.url, 503, failure.reason) from None
            raise

    async def _readmit(self, server: Server) -> None:
        """Before a server that was gone is asked again: it must have the weights of the current version."""
        served = self._served
        if isinstance(self._transfer, AdapterTransfer):
            if served.model != self.settings.model:
                await self._transfer.readmit(self._http, server.url, served.model)
            return
        if self.last_sync is None:
            return
        body = {"method": "plumbob_version"}
        answer = await self._http.request("POST", server.url, "/collective_rpc", body)
        if any(worker["version"] != served.version for worker in answer["results"]):
            raise Unusable(
                f"the vLLM server at {server.url} was started again and has not the trained weights; they are sent at the "
                "next sync, or resume the run"
            )

    def _make_transfer(self, version: tuple[int, int]) -> AdapterTransfer | WeightTransfer:
        s = self.settings
        if s.sync == "lora":
            if s.lora is None:
                raise ValueError("a LoRA sync needs the adapter's shape")
            return AdapterTransfer(self._control, self._folder, s.lora)
        mover: Mover
        if s.sync == "disk":
            mover = DiskMover(self._control, self._folder, s.dtype)
        elif s.sync == "ipc":
            mover = IpcMover(self._control, version, s.dtype, s.device)
        else:
            mover = NcclMover(self._control, version, s.dtype, s.device)
        return WeightTransfer(self._control, mover, s.model, s.dtype)


@dataclass(frozen=True)
class SyncCost:
    """Of one `update`."""

    seconds: float
    pushed: Pushed


class Aborted(Exception):
    """The server ended a completion that was not complete."""


def sampling_params(sampling: Sampling, *, seeded: bool) -> dict[str, Any]:
    """vLLM's names for how a completion is drawn, with what makes the answer cheap for the server to give."""
    params: dict[str, Any] = {
        **generate_route.sampling_names(sampling),
        "ignore_eos": True,  # only the ids above end a completion
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
        "output_kind": 2,  # FINAL_ONLY: nothing is assembled for each token
    }
    if seeded and sampling.seed is not None:
        params["seed"] = sampling.seed % (1 << 63)
    return params


def read_completion(content: bytes, *, version: int, greedy: bool) -> Completion:
    """The completion in an answer of `/inference/v1/generate`. Raises Aborted, and ValueError for what cannot be trained."""
    choice = json.loads(content)["choices"][0]
    token_ids, items = choice["token_ids"], choice["logprobs"]["content"]
    logprobs = [item["logprob"] for item in items]
    finish = choice["finish_reason"]
    if finish in ("abort", "error"):
        raise Aborted
    if finish not in ("stop", "length") or not token_ids:
        raise ValueError(f"it ended for the reason {finish!r} after {len(token_ids)} tokens")
    if not generate_route.are_of(items, token_ids):
        raise ValueError("its log-probabilities do not belong to its token ids")
    if not all(map(math.isfinite, logprobs)) or min(logprobs) <= NO_LOGPROB:
        raise ValueError("a token has no log-probability")
    if greedy:
        logprobs = [0.0] * len(logprobs)
    return Completion(tuple(token_ids), tuple(logprobs), finish, version)


def read_prompt_logprobs(content: bytes, *, token_ids: Sequence[int]) -> list[float]:
    """Log-probability of each prompt token but the first, [T - 1]. Raises ValueError."""
    given = json.loads(content)["prompt_logprobs"]
    if given is None or len(given) != len(token_ids):
        raise ValueError(f"{len(given or ())} log-probabilities for {len(token_ids)} ids")
    return [float(at[str(token)]["logprob"]) for at, token in zip(given[1:], token_ids[1:], strict=True)]


def _root(url: str) -> str:
    """Scheme, host and port of a server's URL, with or without /v1. Raises UserError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--vllm-url {url!r} is no URL of a server; give one like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}"


def _exchange_folder(wanted: Path | None, urls: Sequence[str]) -> Path:
    """A new folder that the servers can read. Raises UserError."""
    if wanted is None:
        if not all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in urls):
            raise UserError("servers on other machines need a folder that both machines share, for what is synced")
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30
        wanted = memory if roomy else Path(tempfile.gettempdir())
    wanted.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="plumbob-vllm-", dir=wanted))
