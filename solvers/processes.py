"""Several processes that have a batch between them, over `torch.distributed`."""

from __future__ import annotations

import io
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpomdp_ppl.errors import rejected
from solvers.batchwide import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from solvers.batchwide import Batchwide

WELL, INTERRUPTED, FAILED = 0, 1, 2
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ROOM = 64  # numbers that are exchanged together with how everybody is doing


class ProcessFailedError(RuntimeError):
    """Another process failed, or is gone, and without it there is no going on."""


def batchwide(device: torch.device) -> Batchwide:
    """All processes of the default group of `torch.distributed`, if there is one; or this one alone.

    Args:
        device: Where tensors are that belong to the model.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Processes(device)
    return ALONE


@contextmanager
def joined() -> Iterator[None]:
    """Inside, this process is one of those that `torchrun` started, if it did: gloo on CPU, nccl on CUDA.

    Those that `torchrun` restarts on one machine do not meet what their predecessors left in its store: there
    they would find addresses of processes that are gone. On several machines nobody counts the restarts of
    all, and it takes `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment of `torchrun` for the same.

    Raises:
        ValueError: If `WORLD_SIZE` says that there are several, and the rest of the environment is not there.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1" or (dist.is_available() and dist.is_initialized()):
        yield
        return
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing or not size.isdecimal():
        expected = f"1, or an environment as torchrun makes it, with {', '.join(NEEDED)}"
        raise rejected("WORLD_SIZE", size, expected)
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    from torch.distributed.rendezvous import rendezvous  # not there in every build of torch

    store, rank, number = next(rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == size:
        attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Processes:
    """The processes of the default group, each with some episodes of one batch.

    Every exchange begins with a message of one size, in which each says how it is doing, so that whoever
    fails can tell the others wherever they are, and nobody waits for what never comes. Ctrl-C waits for that
    moment, too. A few numbers go along with that message; more of them take another.

    Args:
        device: Where tensors are that belong to the model.

    Raises:
        ValueError: If the group's backend does not serve that device.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._home = device
        backend, on_cuda = str(dist.get_backend()), device.type == "cuda"
        if backend == "nccl" and not on_cuda:
            raise rejected("backend", backend, f"one for a model on {device.type}, such as gloo")
        on_cuda = on_cuda and "nccl" in backend
        self._device = device if on_cuda else torch.device("cpu")  # where what is exchanged has to be
        self._known: BaseException | None = None  # the latest that all know of
        self._pressed = False  # Ctrl-C, and nobody has been told yet
        self._granted = False

    def total(self, values: Tensor) -> Tensor:
        """Sum over processes, in float64."""
        own = values.detach().to(self._device, torch.float64)
        if own.numel() <= ROOM:
            summed = self._agree(self._state(), own.flatten()).view_as(own)
        else:
            self.agree()
            summed = own.clone(memory_format=torch.contiguous_format)
            self._exchange(dist.all_reduce, summed)
        return summed.to(values.device)

    def mean(self, *values: Tensor) -> Tensor:
        """Means over all episodes of all processes, summed in float64."""
        own = [each.detach().double() for each in values]
        sums = torch.stack([torch.stack([each.sum(), each.new_tensor(each.numel())]) for each in own])
        total, count = self.total(sums).unbind(1)
        return (total / count).to(values[0].dtype)

    def std_mean(self, values: Tensor, axes: int | None = None) -> tuple[Tensor, Tensor]:
        """Spread and mean over all episodes of all processes, in float64 on the way."""
        own = values.detach().double()
        own = own.reshape(-1, 1) if axes is None else own.flatten(0, axes - 1)  # [n, …]
        sums = self.total(torch.stack([own.sum(0), torch.full_like(own[0], len(own))]))
        mean, count = sums[0] / sums[1], sums[1]
        spread = (self.total((own - mean).square().sum(0)) / count).sqrt()
        if axes is None:
            spread, mean = spread.squeeze(), mean.squeeze()
        return spread.to(values.dtype), mean.to(values.dtype)

    def average(self, losses: Tensor, weights: Sequence[nn.Parameter], share: float) -> Tensor:
        """Losses and gradients weighted by each process's share of the episodes; no gradient stays none."""
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([share * each.detach().flatten().double() for each in (losses, *own)])
        some = flat.new_tensor([float(w.grad is not None) for w in weights])  # may differ between processes
        sizes = [len(losses), *(w.numel() for w in weights), len(weights)]
        parts: list[Tensor] = list(self.total(torch.cat([flat, some])).split(sizes))
        averaged, *gradients, anywhere = parts
        for w, gradient, there in zip(weights, gradients, anywhere.tolist(), strict=True):
            w.grad = gradient.view_as(w).to(w.dtype) if there else None
        return averaged

    def heard(self, words: str | None) -> str | None:
        """What the first of those says that have something to say."""
        if not self.total(torch.tensor(float(words is not None))):
            return None
        by = self._first(words is not None)
        return self._told((words or "").encode(), by).decode()

    def shared(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the first process has, to all; read as files are: numbers and words, never code."""
        self.agree()
        written = io.BytesIO()
        if self.rank == 0:
            torch.save(dict(content), written)
        read = io.BytesIO(self._told(written.getvalue(), by=0))
        result: dict[str, Any] = torch.load(read, map_location=self._home, weights_only=True)
        return result

    def agree(self) -> None:
        """Wait until all are here, and hear whether they are well."""
        self._agree(self._state())

    def _state(self) -> int:
        return INTERRUPTED if self._pressed and not self._granted else WELL

    def _agree(self, state: int, values: Tensor | None = None, words: str = "") -> Tensor:
        """The sum of a few numbers `[n]`, if all are well."""
        news = torch.zeros(2 + ROOM, dtype=torch.float64, device=self._device)
        news[0], news[1] = state == FAILED, state == INTERRUPTED
        n = 0 if values is None else len(values)
        if values is not None:
            news[2 : 2 + n] = values
        self._exchange(dist.all_reduce, news)
        failed, interrupted = news[:2].tolist()
        if failed:
            by = self._first(state == FAILED)
            said = self._told(words.encode(), by).decode()
            raise self._noted(ProcessFailedError(f"process {by} of {self.size} failed: {said}"))
        if interrupted:
            self._granted = True
            raise self._noted(KeyboardInterrupt())
        return news[2 : 2 + n]

    def _first(self, one: bool) -> int:
        """The first of those that are one."""
        rank = torch.tensor(self.rank if one else self.size, device=self._device)
        self._exchange(dist.all_reduce, rank, op=dist.ReduceOp.MIN)
        return int(rank)

    def _noted(self, error: BaseException) -> BaseException:
        self._known = error
        return error

    def _told(self, content: bytes, by: int) -> bytes:
        length = torch.tensor(len(content), device=self._device)
        self._exchange(dist.broadcast, length, src=by)
        letters = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == by and content:
            letters = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        letters = letters.to(self._device)
        if len(letters):
            self._exchange(dist.broadcast, letters, src=by)
        return letters.cpu().numpy().tobytes()

    def _exchange(self, how: Callable[..., Any], tensor: Tensor, **settings: Any) -> None:
        try:
            how(tensor, **settings)
        except RuntimeError as error:  # of gloo and nccl, when the other end is gone
            raise self._noted(ProcessFailedError(f"another process is gone: {error}")) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where an error of one process, or Ctrl-C, is the end for all."""
        with self._patient():
            try:
                yield
            except BaseException as error:
                if error is not self._known:
                    self._announce(error)
                raise

    def _announce(self, error: BaseException) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            self._agree(INTERRUPTED if interrupted else FAILED, words=f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:  # what all have agreed on
            pass
        except ProcessFailedError:  # somebody failed: this one, or another while this was interrupted
            if interrupted:
                raise
        self._known = error

    @contextmanager
    def _patient(self) -> Iterator[None]:
        """Ctrl-C is noted, and waits for the next moment at which the processes talk; once is enough.

        A process that left in the middle of an exchange would leave the others in it.
        """
        before = signal.getsignal(signal.SIGINT)
        ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
        if ours:
            signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            if ours:
                signal.signal(signal.SIGINT, before)
        if ours and self._pressed and not self._granted:  # since they talked for the last time
            raise KeyboardInterrupt

    def _press(self, *_: object) -> None:
        self._pressed = True
