"""Several processes that have a batch between them, over `torch.distributed`."""

from __future__ import annotations

import importlib
import io
import os
import re
import zlib
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpomdp_ppl.errors import invalid, require
from solvers.cids.batchwide import ALONE
from solvers.cids.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from solvers.cids.batchwide import Batchwide

WELL, INTERRUPTED, FAILED = 0, 1, 2
HEAD, ROOM = 6, 64  # numbers about an exchange, and numbers that are exchanged together with them
FAREWELL = timedelta(seconds=20)  # within which the first process should have written what there is to write
_ALONE = ContextVar("_ALONE", default=False)


class ProcessFailedError(RuntimeError):
    """Another process failed, or is gone, and without it there is no going on."""


@contextmanager
def alone() -> Iterator[None]:
    """Inside, fits are of this process alone, whatever process group there is.

    For processes that fit something of their own each, or if one of them fits and the others do not.

    Example:
        >>> with alone():  # in a process group, `cids.fit(model, seed=rank)`
        ...     batchwide(torch.device("cpu")).size
        1
    """
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def batchwide(device: torch.device) -> Batchwide:
    """All processes of the default group of `torch.distributed`, if there is one; or this one alone.

    Args:
        device: Where tensors are that belong to the model.
    """
    if _ALONE.get() or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return Processes(device)


@contextmanager
def joined() -> Iterator[None]:
    """Inside, this process is one of those that `torchrun` started, if it did: gloo on CPU, nccl on CUDA.

    The first process is the first to leave: `torchrun` ends all others as soon as one fails, and the first
    may have something to write.

    Those that `torchrun` restarts on one machine do not meet what their predecessors left in its store: there
    they would find addresses of processes that are gone. On several machines nobody counts the restarts of
    all, and it takes `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment of `torchrun` for the same.

    Raises:
        ValueError: If `WORLD_SIZE` says that there are several, and the rest of the environment is not there.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or (dist.is_available() and dist.is_initialized()):
        yield
        return
    _require_environment()
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
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # of the store, which may be gone
            if rank == 0:
                store.set(f"farewell-{attempt}", "")
            else:
                store.wait([f"farewell-{attempt}"], FAREWELL)
        dist.destroy_process_group()


def _require_environment() -> None:
    """Raise unless the environment says where the processes meet, and which of them this is."""
    numbers = {"WORLD_SIZE": range(1, 2**31), "MASTER_PORT": range(2**16)}
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal():
        numbers["RANK"] = range(int(size))
    for name, values in numbers.items():
        word = os.environ.get(name)
        proper = word is not None and word.isdecimal() and int(word) in values
        require(
            proper, name, word, f"a number from {values.start} to {values.stop - 1}, as torchrun gives it"
        )
    address = os.environ.get("MASTER_ADDR")
    require(bool(address), "MASTER_ADDR", address, "the address of the first process, as torchrun gives it")


class Processes:
    """The processes of the default group, each with some episodes of one batch.

    Every exchange begins with a message of one size, in which each says how it is doing, so that whoever
    fails can tell the others wherever they are, and nobody waits for what never comes. It says what is being
    exchanged, too: those who are at different things all find out. Ctrl-C waits for that moment, and other
    signals for the exchange to end. A few numbers go along with that message; more of them take another.

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
            raise invalid("backend", backend, f"one for a model on {device.type}, such as gloo")
        on_cuda = on_cuda and "nccl" in backend
        self._device = device if on_cuda else torch.device("cpu")  # where what is exchanged has to be

    def total(self, values: Tensor) -> Tensor:
        """Sum over processes, in float64."""
        return self._total(values)

    @PATIENCE.talking()
    def _total(self, values: Tensor, what: str = "") -> Tensor:
        own = values.detach().to(self._device, torch.float64)
        what = f"a sum of {list(own.shape)} numbers{what}"
        if own.numel() <= ROOM:
            summed = self._agree(_state(), what, own.flatten()).view_as(own)
        else:
            self._agree(_state(), what)
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

    def average(
        self, losses: Tensor, weights: Sequence[nn.Parameter], share: float, names: Sequence[str] = ()
    ) -> Tensor:
        """Losses and gradients weighted by each process's share of the episodes; no gradient stays none."""
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([share * each.detach().flatten().double() for each in (losses, *own)])
        some = flat.new_tensor([float(w.grad is not None) for w in weights])  # may differ between processes
        sizes = [len(losses), *(w.numel() for w in weights), len(weights)]
        parts: list[Tensor] = list(
            self._total(torch.cat([flat, some]), f" ({', '.join(names)})").split(sizes)
        )
        averaged, *gradients, anywhere = parts
        for w, gradient, there in zip(weights, gradients, anywhere.tolist(), strict=True):
            w.grad = gradient.view_as(w).to(w.dtype) if there else None
        return averaged

    @PATIENCE.talking()
    def heard(self, words: str | None) -> str | None:
        """What the first of those says that have something to say."""
        content = b"" if words is None else _bytes(words)
        if not self._total(torch.tensor(float(words is not None)), " of those that have something to say"):
            return None
        return self._told(content, self._first(words is not None)).decode()

    @PATIENCE.talking()
    def shared(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the first process has, to all; read as files are: numbers and words, never code."""
        written = io.BytesIO()
        if self.rank == 0:
            torch.save(dict(content), written)
        self._agree(_state(), f"the {', '.join(content)} of the first process")
        read = io.BytesIO(self._told(written.getvalue(), by=0))
        result: dict[str, Any] = torch.load(read, map_location=self._home, weights_only=True)
        return result

    @PATIENCE.talking()
    def agree(self) -> None:
        """Wait until all are here, and hear whether they are well."""
        self._agree(_state(), "an agreement")

    def finish(self) -> None:
        """From here on, Ctrl-C comes too late."""
        PATIENCE.granted = True

    def _agree(self, state: int, what: str, values: Tensor | None = None, words: bytes = b"") -> Tensor:
        """The sum of a few numbers `[n]`, if all are well and at the same thing."""
        high, low = divmod(zlib.crc32(what.encode()), 2**16)  # their squares add up exactly
        head = [state == FAILED, state == INTERRUPTED, high, low, high**2, low**2]
        news = torch.tensor([*head, *[0.0] * ROOM], dtype=torch.float64, device=self._device)
        n = 0 if values is None else len(values)
        if values is not None:
            news[HEAD : HEAD + n] = values
        self._exchange(dist.all_reduce, news)
        failed, interrupted, high, low, *squares = news[:HEAD].tolist()
        if failed:
            by = self._first(state == FAILED)
            said = self._told(words, by).decode()
            raise _known(ProcessFailedError(f"process {by} of {self.size} failed: {said}"))
        if interrupted:
            PATIENCE.granted = True
            raise _known(KeyboardInterrupt())
        if [high**2, low**2] != [self.size * each for each in squares]:  # they vary
            first = self._told(what.encode(), by=0).decode()
            raise _known(
                ProcessFailedError(
                    f"the processes are not at the same thing: process 0 at {first}, process {self.rank} at "
                    f"{what}; all of them have to call the same with the same arguments"
                )
            )
        return news[HEAD : HEAD + n]

    def _first(self, one: bool) -> int:
        """The first of those that are one."""
        rank = torch.tensor(self.rank if one else self.size, device=self._device)
        self._exchange(dist.all_reduce, rank, op=dist.ReduceOp.MIN)
        return int(rank)

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
            if tensor.is_cuda:  # where calls return before anything has happened
                torch.cuda.synchronize(tensor.device)
        except RuntimeError as error:  # of gloo and nccl, when the other end is gone
            late = re.search("tim(ed|e) ?out", str(error), re.IGNORECASE)
            what = "did not answer in time" if late else "is gone"
            raise _known(ProcessFailedError(f"another process {what}: {error}")) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where an error of one process, or Ctrl-C, is the end for all."""
        with PATIENCE.kept():
            try:
                yield
            except BaseException as error:
                if not getattr(error, KNOWN, False):
                    self._announce(error)
                raise

    @PATIENCE.talking()
    def _announce(self, error: BaseException) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            words = f"{type(error).__name__}: {error}"
        except Exception:  # an error in the error
            words = type(error).__name__
        try:
            self._agree(INTERRUPTED if interrupted else FAILED, "an error", words=_bytes(words))
        except KeyboardInterrupt:  # what all have agreed on
            pass
        except ProcessFailedError:  # somebody failed: this one, or another while this was interrupted
            if interrupted:
                raise
        _known(error)


KNOWN = "_known_to_all_processes"


def _known(error: BaseException) -> BaseException:
    """The same error, with a mark on it: nobody needs to be told again."""
    setattr(error, KNOWN, True)
    return error


def _state() -> int:
    return INTERRUPTED if PATIENCE.pressed and not PATIENCE.granted else WELL


def _bytes(words: str) -> bytes:
    """Also of words that cannot be written down, such as names of files in another encoding."""
    return words.encode(errors="backslashreplace")
