"""The same thing done to many, side by side on joblib: one thread each, and whoever is killed is replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pyro
import torch

from cpomdp_ppl.errors import rejected, require, require_count, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from pyro.params.param_store import StateDict

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Results: TypeAlias = "Generator[tuple[int, Outcome], None, None]"
"""Outcomes with the indices of their items; to be closed by who leaves early."""

RETRIES = 2
EVERY = 1.0  # seconds between looks at whether the calling process is still there


class WorkerKilledError(RuntimeError):
    """Processes were killed (for want of memory, perhaps) as often as they took up some of the items.

    Attributes:
        missing: Which items, by index; all others are done.
    """

    def __init__(self, missing: Sequence[int]) -> None:
        self.missing = tuple(missing)
        super().__init__(f"each process that took up {_listed(self.missing)} was killed; the others are done")


def in_parallel(
    function: Callable[[Item], Outcome],
    items: Sequence[Item],
    *,
    workers: int | None = None,
    retries: int = RETRIES,
) -> Results[Outcome]:
    """Do the same to many things, and yield each outcome with its item's index as soon as it is there.

    Each is done by a single thread, with the caller's default dtype and Pyro params, so that bits do not
    depend on how many there are at work. Random numbers are the function's own affair; on Dask, those of
    Python's `random` are not, as threads of Dask's own draw from it, too.

    When a process is killed, those items that it may have been at are taken up again, after all others. The
    last time, each has a process to itself: who is killed then has nobody else to blame, and nobody is lost
    in bad company. On Dask it is the scheduler that does this, and `allowed-failures` that says how often.

    Args:
        function: Of one item. What it raises ends all of it.
        items: Sent to processes by (cloud)pickle, as is the function.
        workers: How many processes. One is this process itself, without joblib. None is what joblib is
            configured for, by `joblib.parallel_config(backend="dask")` for instance, or as many as there
            are cores. Inside a function that is itself one of many, it is always this process.
        retries: How often an item may be taken up again.

    Raises:
        WorkerKilledError: If that was not often enough; after all the others.

    Example:
        >>> dict(in_parallel(lambda number: number**2, [1, 2, 3], workers=1))
        {0: 1, 1: 4, 2: 9}
    """
    require_workers(workers)
    number = whole_number(retries)
    require(number is not None and number >= 0, "retries", retries, "a number of times, or 0")
    backend, n = (None, 1) if workers == 1 or _INSIDE.now else _backend(workers)
    if backend is None:
        return _here(function, items)
    call = Alone(function, torch.get_default_dtype(), _params(), os.getpid())
    client = getattr(backend, "client", None)
    if client is not None:
        return _on_dask(client, call, items)
    return _on_joblib(backend, n, call, items, int(retries))


def require_workers(workers: Any) -> None:
    """Raise unless this is a number of processes, or None, and what they need is installed."""
    if workers is not None and require_count("workers", workers) == 1:
        return
    try:
        import joblib  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise rejected(
            "workers", workers, "1, or joblib to be installed: pip install 'cpomdp-ppl[parallel]'"
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with a single thread; with more, sums are added up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Inside(threading.local):
    """Whether this thread is at one of many things."""

    now = False


_INSIDE = _Inside()
_TURN = threading.Lock()
_FOLLOWED: set[int] = set()


class Alone:
    """A function as another process calls it: with one thread, and with what is global in the caller's.

    Args:
        function: Of one item.
        dtype: The caller's default.
        params: The caller's param store, if anything is there.
        caller: Its process.
    """

    def __init__(
        self, function: Callable[[Item], Any], dtype: torch.dtype, params: StateDict | None, caller: int
    ) -> None:
        self.function, self.dtype, self.params, self.caller = function, dtype, params, caller

    def __call__(self, k: int, item: Any) -> tuple[int, Any]:
        """The index, and the outcome."""
        _follow(self.caller)
        # A Dask worker may have several threads, but there is one state of the generators.
        with _TURN, one_thread(), pyro.get_param_store().scope(self.params):
            before, _INSIDE.now = torch.get_default_dtype(), True
            torch.set_default_dtype(self.dtype)
            try:
                return k, self.function(item)
            finally:
                torch.set_default_dtype(before)
                _INSIDE.now = False


def _params() -> StateDict | None:
    store = pyro.get_param_store()
    return store.get_state() if len(store) else None


def _here(function: Callable[[Item], Outcome], items: Sequence[Item]) -> Results[Outcome]:
    for k, item in enumerate(items):
        with one_thread():  # not around the yield: between items the threads are the caller's
            outcome = function(item)
        yield k, outcome


def _backend(workers: int | None) -> tuple[Any, int]:
    """Joblib's active backend and how many processes it will have; None if that is this process."""
    from joblib.parallel import (  # type: ignore[import-untyped]
        SequentialBackend,
        ThreadingBackend,
        get_active_backend,
    )

    backend, configured = get_active_backend()
    if isinstance(backend, ThreadingBackend):
        raise rejected("backend", "threading", "a joblib backend of processes: loky or dask, for instance")
    if isinstance(backend, SequentialBackend):
        return None, 1
    wanted = configured if workers is None else workers
    n = backend.effective_n_jobs(-1 if wanted is None else wanted)
    alone = n == 1 and not hasattr(backend, "client")
    return (None, 1) if alone else (backend, n)


def _on_joblib(backend: Any, n: int, call: Alone, items: Sequence[Any], retries: int) -> Results[Any]:
    from joblib.externals.loky.process_executor import (  # type: ignore[import-untyped]
        TerminatedWorkerError,
    )

    killed = dict.fromkeys(range(len(items)), 0)
    waiting = list(killed)
    missing: list[int] = []
    while waiting:
        left = [k for k in waiting if killed[k] < max(retries, 1)] or waiting[:1]
        try:
            with closing(_once(backend, n, call, [(k, items[k]) for k in left])) as outcomes:
                for k, outcome in outcomes:
                    left.remove(k)
                    waiting.remove(k)
                    yield k, outcome
        except TerminatedWorkerError:
            # Items are taken up in this order, so that those in hand are among the first n.
            for k in left[:n]:
                waiting.remove(k)
                killed[k] += 1
                (waiting if killed[k] <= retries else missing).append(k)
            warnings.warn(
                f"a process was killed; {len(waiting)} of {len(items)} are taken up in new ones",
                RuntimeWarning,
                stacklevel=2,
            )
    if missing:
        raise WorkerKilledError(sorted(missing))


def _once(backend: Any, n: int, call: Alone, items: Sequence[tuple[int, Any]]) -> Results[Any]:
    """All of them, until somebody is killed."""
    from joblib import Parallel, delayed

    settings = {
        "n_jobs": max(n, 2),  # joblib takes 1 for this process
        "batch_size": 1,
        "max_nbytes": None,  # or large arrays would come as files that cannot be written to
    }
    if not backend.supports_return_generator:  # nothing comes back before all is done: little at a time
        for first in range(0, len(items), n):
            yield from Parallel(**settings)(delayed(call)(*item) for item in items[first : first + n])
        return
    outcomes = Parallel(**settings, return_as="generator_unordered")(delayed(call)(*item) for item in items)
    try:
        for outcome in outcomes:  # noqa: UP028  `yield from` would close it before we can
            yield outcome
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells those who leave early that they might have known
            outcomes.close()


def _on_dask(client: Any, call: Alone, items: Sequence[Any]) -> Results[Any]:
    """By the client itself: joblib waits for ever for a task that Dask has given up."""
    from distributed import KilledWorker, as_completed

    tasks = {client.submit(call, k, item, pure=False): k for k, item in enumerate(items)}
    missing = []
    try:
        for task in as_completed(list(tasks)):
            k = tasks.pop(task)
            try:
                _, outcome = task.result()
            except KilledWorker:
                missing.append(k)
            else:
                yield k, outcome
    finally:
        client.cancel(list(tasks))
    if missing:
        raise WorkerKilledError(sorted(missing))


def _follow(caller: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the parent; and end when it is gone."""

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(EVERY)
        os._exit(1)  # nobody would hear of the outcome

    if os.getppid() == caller and caller not in _FOLLOWED:
        _FOLLOWED.add(caller)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=watch, daemon=True).start()


def _listed(indices: Sequence[int]) -> str:
    few = ", ".join(map(str, indices[:5]))
    return f"{'item' if len(indices) == 1 else 'items'} {few}{', …' * (len(indices) > 5)}"
