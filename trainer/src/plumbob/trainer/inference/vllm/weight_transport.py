"""Weight sync of all weights to vLLM, through its own endpoints: NCCL between GPUs, CUDA IPC on one GPU, or files.

A sync by NCCL or IPC pauses the server, starts an update, sends the weights in chunks, finishes the update, marks the
server with the policy version, and resumes it. vLLM up to 0.26 expects `packed` with each chunk, and from 0.27 on once
at the start.
"""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from plumbob.trainer.distributed.base import shapes_of
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.inference.vllm.adapter_sync import Pushed, written
from plumbob.trainer.inference.vllm.control import Control
from safetensors.torch import save_file

BUFFER = 256 << 20
"""Size in bytes of the buffer in which weights are sent; a larger single tensor gets a larger buffer."""

Weights = Mapping[str, torch.Tensor]


class WeightTransport(Protocol):
    """One way of sending all weights to the servers."""

    def move(self, weights: Weights, version: int) -> None:
        """Send `weights` to every server while it is paused. Raises SyncError."""
        ...

    def close(self) -> None:
        """Release buffers and groups."""
        ...


class WeightTransfer:
    """Sends all weights to every server, while no completion is under way."""

    def __init__(self, control: Control, transport: WeightTransport, model: str, dtype: torch.dtype) -> None:
        self.control, self.transport, self.model, self.dtype = control, transport, model, dtype

    def push(self, weights: Weights, version: int) -> Pushed:
        """Send the weights.

        Raises SyncError; a server may then have a part of them and must not be used before the next push.
        """
        # Pausing waits for the completions of all clients and drops cached keys and values of the old weights.
        self.control.each("POST", "/pause", params={"mode": "wait", "clear_cache": "true"})
        try:
            self.transport.move(weights, version)
            self._mark(version)
        finally:
            with suppress(SyncError):  # an error above says more than a failed resume
                self.control.each("POST", "/resume")
        size = sum(shape.numel() * self.dtype.itemsize for shape in shapes_of(weights).values())
        return Pushed(size, self.model)

    def close(self) -> None:
        self.transport.close()

    def _mark(self, version: int) -> None:
        """Mark each server with the policy version, because a restarted one has its files' weights."""
        try:
            self.control.each("POST", "/collective_rpc", {"method": "plumbob_mark", "args": [version]})
        except SyncError as error:
            raise SyncError(f"{error}; start the server with vf-vllm") from None


class DiskTransport:
    """Sends weights through files in a folder that both the trainer and the servers can read."""

    def __init__(self, control: Control, folder: Path, dtype: torch.dtype) -> None:
        self.control, self.folder, self.dtype = control, folder, dtype

    def move(self, weights: Weights, version: int) -> None:
        folder = self.folder / f"weights-{version}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tensors = {name: t.detach().to("cpu", self.dtype, copy=True).contiguous() for name, t in weights.items()}
            with written(folder):
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self.control.each("POST", "/collective_rpc", body)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Chunk:
    """Tensors that are packed one after the other, from the start of a buffer."""

    names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    """Size of each tensor in bytes."""


def packed_chunks(weights: Weights, dtype: torch.dtype, buffer: torch.Tensor) -> Iterator[Chunk]:
    """Fill `buffer` (uint8) with as many whole tensors as fit, yield what it holds, and repeat until all are done."""
    chunk, used = Chunk([], [], []), 0
    for name, tensor in weights.items():
        size = tensor.numel() * dtype.itemsize
        if chunk.names and used + size > buffer.numel():
            yield chunk
            chunk, used = Chunk([], [], []), 0
        place = buffer[used : used + size].view(dtype).view(tensor.shape)
        place.copy_(tensor.detach())  # also casts to dtype
        chunk.names.append(name)
        chunk.shapes.append(list(tensor.shape))
        chunk.tensor_sizes.append(size)
        used += size
    if chunk.names:
        yield chunk


def export_cuda(buffer: torch.Tensor) -> dict[str, Any]:
    """How a process on the same GPU opens `buffer`: the GPU's UUID -> arguments of torch's rebuild_cuda_tensor."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.current_stream().synchronize()
    return {str(torch.cuda.get_device_properties(buffer.device).uuid): reduce_tensor(buffer)[1]}


class _GpuTransport:
    """What both ways of sending from GPU to GPU have in common. `version`: of vLLM, major and minor."""

    def __init__(
        self,
        control: Control,
        version: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        buffer_bytes: int = BUFFER,
    ) -> None:
        self.control, self.dtype, self.device, self.buffer_bytes = control, dtype, device, buffer_bytes
        self.packed_at_start = version >= (0, 27)

    def _described(self, names: list[str], shapes: list[list[int]]) -> dict[str, Any]:
        """Tensors as vLLM's update_weights names them."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"names": names, "dtype_names": [dtype] * len(names), "shapes": shapes}


class IpcTransport(_GpuTransport):
    """Sends weights by CUDA IPC: through a buffer on the trainer's GPU that servers on the same GPU map.

    One buffer is kept for as long as the engine lives, because vLLM 0.25 releases a mapping once too often and a buffer
    per sync would never be freed.
    """

    export: Callable[[torch.Tensor], dict[str, Any]] = staticmethod(export_cuda)
    """Makes of the buffer what the servers open it with."""
    _buffer: torch.Tensor | None = None
    _handle = ""

    def move(self, weights: Weights, version: int) -> None:
        buffer = self._prepare(max(s.numel() for s in shapes_of(weights).values()) * self.dtype.itemsize)
        self.control.each("POST", "/start_weight_update")
        for chunk in packed_chunks(weights, self.dtype, buffer):
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            info = {
                **self._described(chunk.names, chunk.shapes),
                "tensor_sizes": chunk.tensor_sizes,
                "ipc_handles_pickled": self._handle,
                **({} if self.packed_at_start else {"packed": True}),
            }
            self.control.each("POST", "/update_weights", {"update_info": info})
        self.control.each("POST", "/finish_weight_update")

    def _prepare(self, largest: int) -> torch.Tensor:
        if self._buffer is None:
            start = {"packed": True} if self.packed_at_start else {}
            self.control.each("POST", "/init_weight_transfer_engine", {"init_info": start})
            self._buffer = torch.empty(max(self.buffer_bytes, largest), dtype=torch.uint8, device=self.device)
            self._handle = base64.b64encode(pickle.dumps(self.export(self._buffer))).decode()
        return self._buffer

    def close(self) -> None:
        self._buffer = None


class NcclTransport(_GpuTransport):
    """Sends weights by NCCL broadcast from the trainer's GPU to the servers' other GPUs.

    Imports vLLM in the trainer's process.
    """

    _group: Any = None

    def move(self, weights: Weights, version: int) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer  # ty: ignore[import-not-found]

        self._join()
        info = self._described(list(weights), [list(shape) for shape in shapes_of(weights).values()])
        if not self.packed_at_start:
            info |= self._packing()

        def broadcast() -> None:
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize(self.device)  # the producer packs on its own streams, which do not wait for this one
            packed_nccl_broadcast_producer(
                iterator=((name, t.detach().to(self.dtype)) for name, t in weights.items()),
                group=self._group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self.buffer_bytes,
                num_buffers=2,
            )
            torch.cuda.synchronize(self.device)

        self.control.each("POST", "/start_weight_update")
        self._together(lambda: self.control.each("POST", "/update_weights", {"update_info": info}), broadcast)
        self.control.each("POST", "/finish_weight_update")

    def _packing(self) -> dict[str, Any]:
        return {"packed": True, "packed_buffer_size_bytes": self.buffer_bytes, "packed_num_buffers": 2}

    def _join(self) -> None:
        """Form the NCCL group of this process (rank 0) and all workers of all servers, once."""
        if self._group is not None:
            return
        from vllm.distributed.weight_transfer.nccl_common import trainer_init  # ty: ignore[import-not-found]

        sizes = [answer["world_size"] for answer in self.control.each("GET", "/get_world_size", read=json.loads)]
        address, port = meeting_point(self.control.urls)
        common = {"master_address": address, "master_port": port, "world_size": 1 + sum(sizes)}
        packing = self._packing() if self.packed_at_start else {}
        bodies = [
            {"init_info": {**common, "rank_offset": 1 + sum(sizes[:i]), **packing}}
            for i in range(len(self.control.urls))
        ]

        def ask(url: str, body: dict[str, Any]) -> None:
            Control(self.control.http, [url]).each("POST", "/init_weight_transfer_engine", body)

        def announce() -> None:
            with ThreadPoolExecutor(len(bodies)) as threads:
                list(threads.map(ask, self.control.urls, bodies))

        def join() -> Any:
            torch.cuda.set_device(self.device)
            return trainer_init(common)

        self._group = self._together(announce, join)

    def _together(self, there: Callable[[], Any], here: Callable[[], Any]) -> Any:
        """Run both ends of an NCCL collective at the same time; returns the result of `here`.

        If one end fails, the other would wait forever; the wait ends with the first error, or with a SyncError after a
        time limit.
        """
        ends = [_in_thread(there), _in_thread(here)]
        limit = self.control.http.timing.control + 10
        done, pending = wait(ends, timeout=limit, return_when=FIRST_EXCEPTION)
        for end in ends:
            if end in done and (error := end.exception()) is not None:
                raise error if isinstance(error, SyncError) else SyncError(f"NCCL failed in the trainer: {error!r}")
        if pending:
            raise SyncError(f"sending weights by NCCL took longer than {limit:g} s; see the server's log")
        return ends[1].result()

    def close(self) -> None:
        self._group = None


def _in_thread(job: Callable[[], Any]) -> Future[Any]:
    """Run `job` in a daemon thread, so that a hanging collective does not keep the process alive."""
    future: Future[Any] = Future()

    def main() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=main, daemon=True).start()
    return future


def meeting_point(urls: list[str]) -> tuple[str, int]:
    """The address at which the servers reach this machine, and a free port."""
    host = urlsplit(urls[0]).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a UDP connect sends nothing; it only selects the network interface
        address = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
