"""One fit by several processes of `torch.distributed`, each of which has some episodes of every batch."""

from __future__ import annotations

import importlib
import io
import os
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.rng import seed_for
from solvers.cids.batch import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MESSAGE_BYTES = 512  # what is longer is cut off
_SINGLE = ContextVar("_SINGLE", default=False)


class ProcessFailedError(RuntimeError):
    """Another process failed, or is gone, and without it there is no going on."""


class SingleProcess(Statistics):
    """One process that has all episodes."""

    rank, size = 0, 1

    def first_message(self, words: str | None) -> str | None:
        """What the first process says that has something to say; None if none has."""
        return words

    def broadcast(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the first process has: tensors, numbers and words."""
        return content

    def barrier(self) -> None:
        """Wait until all processes are here."""


SINGLE_PROCESS = SingleProcess()


class ProcessGroup(SingleProcess):
    """All processes of the default group, on connections that are used for one purpose and then closed.

    All of them make the same calls in the same order. One that fails closes its connections, and so ends the
    others as well; see `process_group`.
    """

    def __init__(self, device: torch.device) -> None:
        backend = str(dist.get_backend())
        if backend == "nccl" and device.type != "cuda":
            raise invalid("backend", backend, f"one for a model on {device.type}, such as gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._model_device = device
        self._device = device if "nccl" in backend and device.type == "cuda" else torch.device("cpu")
        self._group: Any = dist.new_group()

    def close(self) -> None:
        """Hang up: whoever still waits for this process raises an error."""
        dist.destroy_process_group(self._group)
        self._group = None

    def mean(self, values: Tensor) -> Tensor:
        """Mean over all episodes of all processes, summed in float64."""
        own = values.detach().double()
        total, count = self._sum(torch.stack([own.sum(), own.new_tensor(own.numel())]))
        mean: Tensor = total / count
        return mean.to(values.dtype)

    def spread(self, values: Tensor, axes: int | None = None) -> tuple[Tensor, Tensor]:
        """Standard deviation and mean over all episodes of all processes, summed in float64."""
        own = values.detach().double()
        own = own.flatten() if axes is None else own.flatten(0, axes - 1)  # [n, …]
        total, count = self._sum(torch.stack([own.sum(0), torch.full_like(own.sum(0), len(own))]))
        mean = total / count
        variance = self._sum((own - mean).square().sum(0)) / count
        return variance.sqrt().to(values.dtype), mean.to(values.dtype)

    def average_gradients(self, losses: Tensor, weights: Sequence[nn.Parameter], num_episodes: int) -> Tensor:
        """Losses and gradients, weighted by numbers of episodes; a gradient that nobody has stays None."""
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([num_episodes * each.detach().flatten().double() for each in (losses, *own)])
        some = flat.new_tensor([*(float(w.grad is not None) for w in weights), num_episodes])
        sizes = [len(losses), *(w.numel() for w in weights), len(weights), 1]
        parts: Sequence[Tensor] = self._sum(torch.cat([flat, some])).split(sizes)
        averaged, *gradients, anywhere, total = parts
        for w, gradient, there in zip(weights, gradients, anywhere.tolist(), strict=True):
            w.grad = (gradient / total).view_as(w).to(w.dtype) if there else None
        return averaged / total

    def own_seed(self, seed: int) -> int:
        """Another seed for every process; the first has the seed itself."""
        return seed_for(seed, self.rank) if self.rank else seed

    def first_message(self, words: str | None) -> str | None:
        """What the first process says that has something to say."""
        written = ("" if words is None else words).encode(errors="backslashreplace")[:MESSAGE_BYTES]
        own = torch.tensor([*written, *[0] * (MESSAGE_BYTES - len(written))], dtype=torch.uint8)
        said = [torch.empty_like(own, device=self._device) for _ in range(self.size)]
        self._call(dist.all_gather, said, own.to(self._device))
        messages = [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in said]
        return next((message for message in messages if message), None)

    def broadcast(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the first process has, read as files are: numbers and words, never code."""
        written = io.BytesIO()
        torch.save(dict(content) if self.rank == 0 else {}, written)
        length = torch.tensor(len(written.getvalue()), device=self._device)
        self._call(dist.broadcast, length, src=0)
        sent = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            sent.copy_(torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8))
        self._call(dist.broadcast, sent, src=0)
        received = io.BytesIO(sent.cpu().numpy().tobytes())
        result: dict[str, Any] = torch.load(received, map_location=self._model_device, weights_only=True)
        return result

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self._sum(torch.zeros(()))

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over processes, element by element."""
        total = values.detach().to(self._device, copy=True).contiguous()
        self._call(dist.all_reduce, total)
        return total.to(values.device)

    def _call(self, collective: Callable[..., Any], *tensors: Any, **settings: Any) -> None:
        try:
            collective(*tensors, group=self._group, **settings)
        except RuntimeError as error:  # of gloo and nccl, when the other end is gone or does not answer
            raise ProcessFailedError("another process failed, or is gone") from error


@contextmanager
def process_group(device: torch.device) -> Iterator[SingleProcess]:
    """All processes of the default group of `torch.distributed`, if there is one; otherwise this one.

    An error inside it, Ctrl-C included, ends it for the other processes as well: their next exchange raises a
    `ProcessFailedError`. The device is where the tensors of the model are.
    """
    if _SINGLE.get() or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield SINGLE_PROCESS
        return
    group = ProcessGroup(device)
    try:
        yield group
        group.barrier()
    finally:
        group.close()


@contextmanager
def single_process() -> Iterator[None]:
    """Inside, fits are of this process alone, whatever process group there is.

    This is for processes that each fit something of their own, or if one of them fits and the others do not.

    Examples:
        >>> with single_process(), process_group(torch.device("cpu")) as group:
        ...     group.size
        1
    """
    token = _SINGLE.set(True)
    try:
        yield
    finally:
        _SINGLE.reset(token)


alone = single_process
"""The earlier name of `single_process`."""


@contextmanager
def joined() -> Iterator[None]:
    """Inside, this process is one of those that `torchrun` started, if it did: gloo on CPU, nccl on CUDA.

    Processes that `torchrun` restarts on one machine do not look into what their predecessors left in its
    store, where they would find addresses of processes that are gone. On several machines, this takes
    `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment of `torchrun`.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or (dist.is_available() and dist.is_initialized()):
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if dist.is_nccl_available():  # where no two processes can have the same one
            backend = "cpu:gloo,cuda:nccl"
            expected = f"less than the number of GPUs, {gpus} (or none of them: CUDA_VISIBLE_DEVICES='')"
            require(local < gpus, "LOCAL_RANK", local, expected)
        torch.cuda.set_device(local % gpus)
    # Optimizers import it, and modules that it imports keep the group that there is by then for ever: its
    # threads would still be at work when the interpreter is gone, and crash.
    importlib.import_module("torch._dynamo")
    from torch.distributed.rendezvous import rendezvous  # not there in every build of torch

    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
