"""A double of a vLLM server: it speaks vLLM's protocol over the in-process engine, with faults that can be switched on.

The answers are those of vLLM 0.25.1 and 0.32.0 according to their sources (entrypoints/scale_out/token_in_token_out,
serve/lora, serve/dev, rl/online, distributed/weight_transfer). Tokens, log-probabilities, adapters (through peft) and
weights are real.

Example: `with serving(Double()) as url: ...` serves it in a thread.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import ctypes
import json
import pickle
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from aiohttp import web
from peft import PeftModel
from plumbob.rollout import EngineError, Sampling
from plumbob.trainer.inference.errors import PromptError
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.loading import load_model, load_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""What vLLM answers to all requests under way when its engine dies."""

FUSED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Names of the modules that an adapter can be bound to."""


@dataclass
class Faults:
    """What goes wrong. Every field may be set while the server runs."""

    status: int = 0
    """HTTP status with which the next `count` completions are refused."""
    count: int = 0
    """Number of further completions that are refused with `status`."""
    retry_after: str | None = None
    """Value of the header Retry-After of all refusals."""
    slow: float = 0.0
    """Delay before each completion begins, in seconds."""
    cut: int = 0
    """Number of further completions whose connection is broken off."""
    abort: int = 0
    """Number of further completions that the server aborts."""
    refuse_adapter: str | None = None
    """Message with which adapters are refused."""
    ignore_adapter: bool = False
    """Whether adapters are loaded without changing what the model computes."""
    unbound: int = 0
    """Number of an adapter's modules that are not bound."""
    fail_update: str | None = None
    """Message with which updates of all weights are refused."""
    raw_logprobs: bool = False
    """Whether log-probabilities are those of the model, before temperature and truncation."""
    seen: list[tuple[str, dict]] = field(default_factory=list)
    """Path and body of every request, in order."""

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


class Refused(Exception):
    """A request that is answered with an HTTP status and vLLM's error object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Double:
    """The state of one server, and the handlers of its routes."""

    def __init__(
        self,
        model: str = "tiny",
        *,
        version: str = "0.25.1",
        max_lora_rank: int = 16,
        scale_out: bool = True,
        vocab_size: int | None = None,
        name: str | None = None,
        extension: bool = True,
        takes: str = "disk",
    ) -> None:
        """`vocab_size`: of the model, if it is not the tokenizer's; `extension`: whether `vf-vllm` started the server.

        `takes`: how it takes all weights, which it does with a `max_lora_rank` of 0 alone.
        """
        self.name, self.version, self.max_lora_rank, self.scale_out = name or model, version, max_lora_rank, scale_out
        self.extension, self.takes = extension, takes
        self.dead = False
        """Whether an id outside the model's vocabulary has reached the GPU; vLLM's process then ends."""
        self.faults = Faults()
        self.tokenizer = load_tokenizer(model)
        base = load_model(model)
        if vocab_size is not None:
            base.resize_token_embeddings(vocab_size)
        self.engines = {self.name: self._engine(base)}
        self.adapters: dict[str, tuple[str, int]] = {}
        self.bound = 0
        self.marked = -1
        self.prefix_resets = 0
        self.asleep = False
        self.transfer: dict | None = None
        """The body of the last request to /init_weight_transfer_engine; None before the first."""
        self.updating = False
        self._running: asyncio.Event | None = None

    @property
    def base(self) -> TransformersEngine:
        return self.engines[self.name]

    @property
    def told_at_start(self) -> bool:
        """Whether this version of vLLM takes `packed` when a transfer is initialised, and not with each update."""
        return tuple(map(int, self.version.split(".")[:2])) >= (0, 27)

    def _engine(self, model) -> TransformersEngine:
        return TransformersEngine(model, max_slots=32, max_length=1024)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        for path, handler in {
            "/health": self.health, "/version": self.show_version, "/v1/models": self.models,
            "/get_world_size": self.world_size,
        }.items():  # fmt: skip
            app.router.add_get(path, self._wrap(path, handler))
        for path, handler in {
            "/inference/v1/generate": self.generate, "/pause": self.pause,
            "/v1/load_lora_adapter": self.load_lora, "/v1/unload_lora_adapter": self.unload_lora,
            "/resume": self.resume, "/reset_prefix_cache": self.reset_prefix_cache,
            "/collective_rpc": self.collective_rpc, "/init_weight_transfer_engine": self.init_transfer,
            "/start_weight_update": self.start_update, "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_update, "/sleep": self.sleep, "/wake_up": self.wake_up,
        }.items():  # fmt: skip
            app.router.add_post(path, self._wrap(path, handler))
        return app

    def _wrap(self, path, handler):
        async def answer(request: web.Request) -> web.StreamResponse:
            if self.dead:
                request.transport.abort()
                raise ConnectionResetError
            content = await request.read()
            body = json.loads(content) if content else {}
            self.faults.seen.append((path, body))
            try:
                result = await handler(request, body)
            except Refused as error:
                wrong = {"message": str(error), "type": "BadRequestError", "param": None, "code": error.status}
                headers = {"Retry-After": self.faults.retry_after} if self.faults.retry_after else None
                response = web.json_response({"error": wrong}, status=error.status, headers=headers)
                await response.prepare(request)
                await response.write_eof()
                # vLLM 0.25.1's middleware raises the error again after answering, and uvicorn then closes the
                # connection without announcing it.
                request.transport.close()
                return response
            if isinstance(result, web.StreamResponse):
                return result
            return web.Response() if result is None else web.json_response(result)

        return answer

    async def health(self, request, body):
        return None

    async def show_version(self, request, body):
        return {"version": self.version}

    async def models(self, request, body):
        cards = [{"id": self.name, "max_model_len": self.base.max_length, "parent": None}]
        cards += [{"id": name, "parent": self.name} for name in self.adapters]
        return {"object": "list", "data": cards}

    # --- completions ------------------------------------------------------------------------------------------------

    async def generate(self, request, body):
        if not self.scale_out:
            raise Refused(
                403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            )
        faults, params = self.faults, body["sampling_params"]
        await asyncio.sleep(faults.slow)
        if faults.cut:
            faults.cut -= 1
            request.transport.abort()
            raise ConnectionResetError
        if faults.count:
            faults.count -= 1
            raise Refused(faults.status, "the engine is overloaded")
        if (engine := self.engines.get(body["model"])) is None:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        await self._unpaused().wait()
        ids = body["token_ids"]
        self._check_ids(ids, engine)
        sampling = Sampling(
            max_tokens=min(params["max_tokens"], engine.max_length - len(ids)),
            temperature=params["temperature"],
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", 0),
            min_p=params.get("min_p", 0.0),
            stop_token_ids=tuple(params.get("stop_token_ids", ())),
            seed=params.get("seed"),
        )
        try:
            completion = await engine.generate(ids, sampling)
        except PromptError as error:
            raise Refused(400, str(error)) from None
        except EngineError as error:
            raise Refused(500, str(error)) from None
        if self.dead:  # with all that it was computing
            raise Refused(500, ENGINE_DEAD)
        logprobs, finish = completion.logprobs, completion.finish_reason
        if faults.raw_logprobs:
            scored = engine.score([*ids, *completion.token_ids])
            logprobs = scored[len(ids) - 1 :]
        if faults.abort:
            faults.abort -= 1
            finish = "abort"
        choice = {"index": 0, "token_ids": list(completion.token_ids), "finish_reason": finish, "logprobs": None}
        if "logprobs" in params:
            choice["logprobs"] = {
                "content": [self._logprob(i, p) for i, p in zip(completion.token_ids, logprobs, strict=True)]
            }
        answer = {"request_id": "r", "choices": [choice], "prompt_logprobs": None}
        if "prompt_logprobs" in params:
            scores = engine.score(ids)
            answer["prompt_logprobs"] = [
                None,
                *({str(i): {"logprob": p, "rank": 1}} for i, p in zip(ids[1:], scores, strict=True)),
            ]
        return answer

    def _check_ids(self, ids, engine):
        """As vLLM: ids that the tokenizer or the model has are passed on, and the model's embedding asserts its own.

        0.25.1, v1/engine/input_processor.py and tokenizers/hf.py: the tokenizer's `vocab_size` counts as its largest
        id, which is one too many where the vocabulary holds all tokens (Llama 2, Mistral, SmolLM2), as is assumed here.
        """
        if max(ids) > max(len(self.tokenizer), engine.vocab_size - 1):
            raise Refused(400, f"Token id {max(ids)} is out of vocabulary")
        if max(ids) >= engine.vocab_size:
            self.dead = True
            raise Refused(500, ENGINE_DEAD)

    def _logprob(self, token, logprob):
        if self.version >= "0.32":
            return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}

    # --- adapters ---------------------------------------------------------------------------------------------------

    async def load_lora(self, request, body):
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if self.faults.refuse_adapter:
            raise Refused(500, self.faults.refuse_adapter)
        if not (path / "adapter_config.json").is_file():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {path}")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_lora_rank:
            raise Refused(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
        with safe_open(path / "adapter_model.safetensors", "pt") as tensors:
            modules = {key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in tensors.keys()}  # noqa: SIM118
        own = dict(self.base.model.named_modules())
        self.bound = sum(m in own and m.rsplit(".", 1)[-1] in FUSED for m in modules) - self.faults.unbound
        twin = copy.deepcopy(self.base.model)
        if not self.faults.ignore_adapter:
            twin = PeftModel.from_pretrained(twin, path).merge_and_unload()
        self.engines[name] = self._engine(twin)
        self.adapters[name] = (str(path), rank)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora(self, request, body):
        if body["lora_name"] not in self.adapters:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        # Completions in flight keep a reference to the engine, as vLLM's completions keep their adapter.
        del self.adapters[body["lora_name"]], self.engines[body["lora_name"]]
        return web.Response(text="Success")

    # --- weights ----------------------------------------------------------------------------------------------------

    async def collective_rpc(self, request, body):
        method = body["method"]
        if method.startswith("plumbob_") and not self.extension:
            raise Refused(500, f"Call to collective_rpc method failed: 'Worker' object has no attribute '{method}'")
        if method == "plumbob_model":
            told = {"vocab_size": self.base.vocab_size, "max_lora_rank": self.max_lora_rank, "transfer": self.takes}
            return {"results": [told]}
        if method == "plumbob_bound_modules":
            return {"results": [{"adapter": len(self.adapters), "bound": self.bound}]}
        if method == "plumbob_mark":
            (self.marked,) = body["args"]
            return {"results": [{"version": self.marked}]}
        if method == "plumbob_version":
            return {"results": [{"version": self.marked}]}
        if method == "reload_weights":
            self._require_pause()
            if self.faults.fail_update:
                raise Refused(500, self.faults.fail_update)
            self.base.update(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
            return {"results": [None]}
        raise Refused(500, f"unknown method {method}")

    async def world_size(self, request, body):
        return {"world_size": 1}

    async def init_transfer(self, request, body):
        if set(body["init_info"]) - ({"packed"} if self.told_at_start else set()):
            raise Refused(500, f"Invalid init_info for IPCWeightTransferEngine: {body['init_info']}")
        self.transfer = body["init_info"]
        return {"message": "Weight transfer initialized"}

    async def start_update(self, request, body):
        self._require_pause()
        if self.updating:
            raise Refused(500, "start_weight_update called while a weight update is already active.")
        self.updating = True

    async def update_weights(self, request, body):
        info = body["update_info"]
        if not self.updating or self.transfer is None:
            raise Refused(500, "start_weight_update must be called before update_weights.")
        known = {"names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles_pickled"}
        if set(info) != known | (set() if self.told_at_start else {"packed"}):
            raise Refused(500, f"Invalid update_info for IPCWeightTransferEngine: {sorted(info)}")
        assert self.transfer.get("packed") if self.told_at_start else info["packed"]
        if self.faults.fail_update:
            raise Refused(500, self.faults.fail_update)
        # CUDA would open the buffer through a handle. The double is a thread of the test, so it reads the buffer's
        # address.
        (address,) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"])).values()
        content = bytearray(ctypes.string_at(address, sum(info["tensor_sizes"])))
        parts = torch.frombuffer(content, dtype=torch.uint8).split(info["tensor_sizes"])
        self.base.update(
            {
                name: part.view(getattr(torch, dtype)).view(shape).float()
                for name, dtype, shape, part in zip(
                    info["names"], info["dtype_names"], info["shapes"], parts, strict=True
                )
            }
        )

    async def finish_update(self, request, body):
        if not self.updating:
            raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
        self.updating = False

    async def pause(self, request, body):
        assert request.query["mode"] == "wait"
        self._unpaused().clear()
        while self.base._active or self.base._waiting:
            await asyncio.sleep(0.01)
        return {"status": "paused"}

    async def resume(self, request, body):
        self._unpaused().set()
        return {"status": "resumed"}

    async def reset_prefix_cache(self, request, body):
        self.prefix_resets += 1

    async def sleep(self, request, body):
        self.asleep = True

    async def wake_up(self, request, body):
        self.asleep = False

    def _require_pause(self):
        assert not self._unpaused().is_set(), "weights change while completions may be sampled"

    def _unpaused(self) -> asyncio.Event:
        if self._running is None:
            self._running = asyncio.Event()
            self._running.set()
        return self._running


@contextlib.contextmanager
def serving(double: Double, port: int = 0):
    """Serve `double` in a thread until the block ends; yields the root URL."""
    started, stop, urls = threading.Event(), threading.Event(), []

    async def main():
        runner = web.AppRunner(double.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(10)
