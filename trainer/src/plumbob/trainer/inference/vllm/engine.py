"""The training engine over HTTP: completions from vLLM servers, which receive the trained weights at each sync."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from plumbob.console import UserError
from plumbob.rollout import Completion, EngineError, Sampling
from plumbob.trainer.distributed.base import WholeTensors
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference import generate_api
from plumbob.trainer.inference.engine import WRONG_WEIGHTS, InFlight, WeightUpdate, check_ids
from plumbob.trainer.inference.errors import PromptError, SyncError
from plumbob.trainer.inference.http_client import HttpThread, Timing
from plumbob.trainer.inference.server_pool import Server, Unusable
from plumbob.trainer.inference.token_servers import Served, TokenServers, root_url
from plumbob.trainer.inference.vllm.adapter_sync import AdapterTransfer, LoraShape
from plumbob.trainer.inference.vllm.control import Control, ServerInfo, check_server
from plumbob.trainer.inference.vllm.weight_transport import (
    DiskTransport,
    IpcTransport,
    NcclTransport,
    WeightTransfer,
    WeightTransport,
)

T = TypeVar("T")


@dataclass(frozen=True)
class VllmSettings:
    """Where the servers are and how trained weights reach them.

    Example: `VllmSettings(("http://127.0.0.1:8000",), "tiny", vocab_size=640, lora=LoraShape(16, 32))`.
    """

    urls: tuple[str, ...]
    model: str
    """The name that the servers give the model."""
    vocab_size: int
    lora: LoraShape | None = None
    """Rank and alpha of the adapter that is trained; None: all weights are."""
    dtype: torch.dtype = torch.bfloat16
    """Precision of the servers' weights."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the trained weights."""
    folder: Path | None = None
    """Folder for synced adapters and weights, which all machines share; None: a local one, in memory if possible."""
    seeds: bool = False
    """Whether to send each completion's seed; vLLM then samples request by request, slower and not exact to the bit."""
    timing: Timing = field(default_factory=Timing)
    """Time limits of requests."""


class VllmEngine:
    """A `TrainingEngine` over one or several vLLM servers of one model, whose weights change only through `update`.

    Every process of a run has one and samples from the servers itself; only rank 0 sends them weights.
    """

    def __init__(self, settings: VllmSettings, world: World | None = None) -> None:
        """Raises UserError if a server cannot be reached, serves another model, or lacks an option that is needed."""
        self.settings = settings
        self.dtype = settings.dtype
        self.world = world or World(0, 1, settings.device)
        self.checked: Sequence[float] = ()
        self._synced = False
        urls = [root_url(url) for url in settings.urls]
        if not urls or len(set(urls)) < len(urls):
            problem = "a server twice; give each once" if urls else "no server; give at least one"
            raise UserError(f"--vllm-url names {problem}")
        self._http = HttpThread(settings.timing, os.environ.get("OPENAI_API_KEY"))
        try:
            infos = [check_server(self._http, u, settings.model, settings.vocab_size) for u in urls]
            self._check_takes(infos)
            self.max_length = min(info.max_length for info in infos) or 1 << 30
            self._control = Control(self._http, urls)
            self._servers = TokenServers(self._http, urls, settings.model, seeds=settings.seeds)
            self._servers.pool.readmit = self._readmit
            self._folder = _exchange_folder(settings.folder)
            self._transfer = self._make_transfer(min(info.version for info in infos), infos[0].transfer)
        except BaseException:
            self._http.close()
            raise

    @property
    def version(self) -> int:
        return self._servers.served.version

    @version.setter
    def version(self, version: int) -> None:
        """Set by a resumed run, which continues to count versions; the next `update` sends its weights."""
        self._servers.served = Served(version, self._servers.served.model)

    @property
    def served(self) -> Served:
        """The policy version and the model name that requests use now."""
        return self._servers.served

    @property
    def in_flight(self) -> int:
        """Completions of this process that are under way."""
        return self._servers.in_flight

    @property
    def generated_tokens(self) -> int:
        return self._servers.generated_tokens

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        check_ids(prompt_ids, self.settings.vocab_size)
        if len(prompt_ids) + sampling.max_tokens > self.max_length:
            raise PromptError(
                f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new tokens exceed the vLLM server's limit "
                f"of {self.max_length}; start vf-vllm with a larger --max-model-len"
            )
        return await self._servers.generate(prompt_ids, sampling)

    def _check_takes(self, infos: Sequence[ServerInfo]) -> None:
        """Raise UserError for a server that does not take what is trained, or not in the way in which the others do."""
        rank = self.settings.lora.rank if self.settings.lora else 0
        for info in infos:
            if not rank and (info.max_lora_rank or info.transfer != infos[0].transfer):
                taken = "LoRA adapters" if info.max_lora_rank else f"weights by {info.transfer} and another does not"
                raise UserError(
                    f"the vLLM server at {info.url} takes {taken}, and this run trains all weights: start vf-vllm with --sync "
                    "nccl on GPUs of its own, with ipc on the trainer's, or with disk without one; or add --peft"
                )
            if info.max_lora_rank < rank:
                limit = f"only up to rank {info.max_lora_rank}" if info.max_lora_rank else "none"
                raise UserError(
                    f"the adapter has rank {rank}, and the vLLM server at {info.url} takes {limit}; start vf-vllm with "
                    f"--sync lora --max-lora-rank {rank}"
                )

    def update(
        self, weights: WholeTensors | Mapping[str, torch.Tensor], *, in_flight: InFlight = "refuse"
    ) -> WeightUpdate:
        """Send the trained weights to every server. Collective. Raises SyncError and EngineError.

        `in_flight="finish"` works with adapters only: completions under way end with the adapter that they began with.
        After an error an adapter sync still serves the old adapter; a sync of all weights leaves the servers with
        unknown weights.
        """
        self.world.barrier()  # wait until no process has completions that the sync would disturb
        update, self._servers.served = self._from_main(lambda: self._push(weights, in_flight), weights)
        return update

    def _push(
        self, weights: WholeTensors | Mapping[str, torch.Tensor], in_flight: InFlight
    ) -> tuple[WeightUpdate, Served]:
        if self.in_flight and (in_flight == "refuse" or self.settings.lora is None):
            raise EngineError(f"weights cannot change while {self.in_flight} completions are being sampled")
        version = self.version + 1
        pushed = self._transfer.push(weights, version)
        self._servers.served = Served(version, pushed.model)
        self._servers.pool.trust_all()
        if not self.in_flight:
            self._settle()
        self._synced = True
        return WeightUpdate(version, len(weights), pushed.num_bytes, pushed.bound), self.served

    def _from_main(self, act: Callable[[], T], weights: Any = None) -> T:
        """Call `act` on rank 0 and return its result on every process. Collective.

        An error of `act` is raised on rank 0 and as a SyncError on the others, so that no process waits in a collective
        that rank 0 never reaches. `weights`: what `act` sends; every process takes part in gathering it.
        """
        if self.world.is_main:
            try:
                result = act()
            except (SyncError, EngineError, OSError) as error:
                _finish(weights)
                self.world.from_main((str(error), None))
                raise
            return self.world.from_main(("", result))[1]
        _finish(weights)
        failure, result = self.world.from_main(None)
        if failure:
            raise SyncError(failure)
        return result

    def _settle(self) -> None:
        """Unload the old adapter, and drop cached keys and values of the old weights."""
        if isinstance(self._transfer, AdapterTransfer):
            self._transfer.settle()
        try:
            answers = self._control.each("POST", "/reset_prefix_cache")
        except SyncError:
            # vLLM caches keys and values per adapter name, so with an adapter the reset only frees memory.
            if isinstance(self._transfer, WeightTransfer):
                raise
            return
        if isinstance(self._transfer, WeightTransfer) and any(b"false" in answer for answer in answers):
            raise SyncError(
                "another client uses a vLLM server, so that its cache of the old weights cannot be cleared; stop that "
                "client"
            )

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """As `TrainingEngine.score`, computed by the first server. Raises EngineError."""
        return self.score_everywhere(token_ids)[self._control.urls[0]]

    def score_everywhere(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """The log-probabilities that `score` returns, [T - 1], from every server, by its URL. Raises EngineError."""
        sampling = {**generate_api.STATED, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": self.served.model, "token_ids": list(token_ids), "sampling_params": sampling}
        read = partial(generate_api.read_prompt_logprobs, token_ids=token_ids)
        try:
            scores = self._control.each("POST", generate_api.PATH, body, read=read)
        except SyncError as error:
            raise EngineError(f"the served weights cannot be checked: {error}") from None
        return dict(zip(self._control.urls, scores, strict=True))

    def check_parity(self, token_ids: Sequence[int], logprobs: Sequence[float], limit: float) -> float:
        """As `TrainingEngine.check_parity`, for the server that differs most; an error names the server."""
        return self._from_main(lambda: self._parity(token_ids, logprobs, limit))

    def _parity(self, token_ids: Sequence[int], logprobs: Sequence[float], limit: float) -> float:
        worst = -1.0
        for url, served in self.score_everywhere(token_ids).items():
            parity = sum(abs(a - b) for a, b in zip(served, logprobs, strict=True)) / len(served)
            if not parity <= limit:
                raise SyncError(
                    f"after sync {self.version} the log-probabilities of the vLLM server at {url} differ from the trainer's "
                    f"by {parity:.2g} nats on average (limit {limit:g}): {WRONG_WEIGHTS}"
                )
            if parity > worst:
                worst, self.checked = parity, served
        return worst

    def served_weights(self) -> None:
        """None, because the tensors are in the servers' processes."""

    def forget(self) -> None:
        """Do nothing: the keys and values that a server caches depend on the weights alone."""

    def sleep(self) -> None:
        """Put the servers to sleep at level 1, which moves weights to main memory and drops caches. Collective."""
        if self.in_flight:
            raise EngineError(f"the servers cannot sleep while {self.in_flight} completions are being sampled")
        self._on_every_server("/sleep", {"level": "1", "mode": "wait"})

    def wake_up(self) -> None:
        self._on_every_server("/wake_up")

    def _on_every_server(self, path: str, params: Mapping[str, str] | None = None) -> None:
        self.world.barrier()
        if self.world.is_main:
            if self.settings.device.type == "cuda":
                torch.cuda.empty_cache()  # leave reserved but unused GPU memory to the servers
            self._control.each("POST", path, params=params)
        self.world.barrier()

    def close(self) -> None:
        """Unload this run's adapters and delete its files. The servers keep running."""
        try:
            self._transfer.close()
        finally:
            self._http.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _readmit(self, server: Server) -> None:
        """Make sure that a server that was unreachable has the current weights. Raises Unusable and ServerFailure."""
        served = self.served
        if isinstance(self._transfer, AdapterTransfer):
            if served.model != self.settings.model:
                await self._transfer.readmit(self._http, server.url, served.model)
            return
        if not self._synced:
            return
        body = {"method": "plumbob_version"}
        answer = await self._http.request("POST", server.url, "/collective_rpc", body)
        if any(worker["version"] != served.version for worker in answer["results"]):
            raise Unusable(
                f"the vLLM server at {server.url} was restarted and does not have the trained weights; the next weight "
                "sync sends them; if the run has stopped, resume it"
            )

    def _make_transfer(self, version: tuple[int, int], way: str) -> AdapterTransfer | WeightTransfer:
        s = self.settings
        if s.lora is not None:
            return AdapterTransfer(self._control, self._folder, s.lora)
        transport: WeightTransport
        if way == "disk":
            transport = DiskTransport(self._control, self._folder, s.dtype)
        elif way == "ipc":
            transport = IpcTransport(self._control, version, s.dtype, s.device)
        else:
            transport = NcclTransport(self._control, version, s.dtype, s.device)
        return WeightTransfer(self._control, transport, s.model, s.dtype)


def _finish(weights: Any) -> None:
    """Take part in gathering those weights, divided among processes, that have not been gathered yet."""
    if isinstance(weights, WholeTensors):
        weights.finish()


def is_local(url: str) -> bool:
    """Whether the server is on this machine. Others read synced weights from files in a folder that both share."""
    return urlsplit(url if "://" in url else f"http://{url}").hostname in ("127.0.0.1", "localhost", "::1")


def _exchange_folder(wanted: Path | None) -> Path:
    """Make a new folder that the servers can read, in `wanted` if given."""
    if wanted is None:
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30
        wanted = memory if roomy else Path(tempfile.gettempdir())
    wanted.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="plumbob-vllm-", dir=wanted))
