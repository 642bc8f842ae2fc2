"""A function of many items, in several processes: joblib's own, or those of a Dask cluster.

Each item is computed with one thread, so that its bits do not depend on how many processes there are, and an
item whose process was killed is tried again.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
import warnings
from contextlib import closing, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pyro
import torch

from cpomdp_ppl.errors import as_integer, invalid, require, require_count

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from pyro.params.param_store import StateDict

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Results: TypeAlias = "Generator[tuple[int, Outcome], None, None]"
"""Outcomes with the indices of their items; to be closed by callers who leave early."""

RETRIES = 2
SECONDS_BETWEEN_CHECKS = 1.0  # of whether the calling process is still there


class WorkerKilledError(RuntimeError):
    """Every process that took up certain items was killed, for lack of memory, perhaps.

    Attributes:
        missing: Indices of these items; all others are done.
    """

    def __init__(self, missing: Sequence[int]) -> None:
        self.missing = tuple(missing)
        some = ", ".join(map(str, self.missing[:5])) + ", …" * (len(self.missing) > 5)
        items = "item" if len(self.missing) == 1 else "items"
        super().__init__(f"each process that took up {items} {some} was killed; the others are done")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.missing,)


def in_parallel(
    function: Callable[[Item], Outcome],
    items: Iterable[Item],
    *,
    workers: int | None = None,
    retries: int = RETRIES,
) -> Results[Outcome]:
    """Call a function with each item, and yield each outcome with its item's index as soon as it is there.

    Each call has one thread, a copy of the item and of Pyro's params, and the caller's default dtype and
    device. Whatever it sets itself (environment, current directory, filters of warnings) stays set in its
    process, and random numbers are its own affair.

    When a process is killed, the items that it may have been working on are tried again after all others; the
    last time each by itself, so that no item is lost because of another. On Dask, the scheduler tries them
    again, as often as its `allowed-failures` says.

    Args:
        function: Function of one item. What it raises ends all of it.
        items: Arguments of the function. Both are sent to other processes by (cloud)pickle, as are outcomes
            and errors on their way back.
        workers: Number of processes. One is this process itself, without joblib. None is what joblib is
            configured for, or the number of cores. Inside `joblib.parallel_config(backend="dask")` the
            cluster decides; inside a function that is itself called this way it is always this process.
        retries: How often an item is tried again.

    Raises:
        WorkerKilledError: If some items were lost in spite of retries; after all others.

    Examples:
        >>> dict(in_parallel(lambda number: number**2, [1, 2, 3], workers=1))
        {0: 1, 1: 4, 2: 9}
    """
    require_retries(retries)
    client, n = _processes(workers)
    items = list(items)
    call = RemoteCall(function, child=client is None)
    if client is not None:
        return _on_dask(client, call, items)
    if n == 1:
        return ((k, call.here(_copied(item))) for k, item in enumerate(items))
    return _on_joblib(min(n, len(items)), call, items, int(retries))


def stays_here(workers: int | None) -> bool:
    """Whether `in_parallel` would use this process alone; raises what it would raise."""
    return _processes(workers) == (None, 1)


def require_workers(workers: Any) -> None:
    """Raise unless this is a number of processes, or None, and what they need is installed."""
    if workers is not None and require_count("workers", workers) == 1:
        return
    try:
        import joblib  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise invalid(
            "workers", workers, "1, or joblib to be installed: pip install 'cpomdp-ppl[parallel]'"
        ) from error


def require_retries(retries: Any) -> None:
    """Raise unless this is a number of times."""
    number = as_integer(retries)
    require(number is not None and number >= 0, "retries", retries, "a number of times, or 0")


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with a single thread; with more, sums are added up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_IN_WORKER = False  # whether this process is one of many
_ONE_AT_A_TIME = threading.Lock()  # a Dask worker may have several threads, but there is one random state
_JOBLIB = threading.RLock()  # joblib has one set of processes, which all go when one call is broken off
_PROCESS = secrets.token_hex(8)  # on another machine, somebody may have the same process id


class RemoteCall:
    """A function with what is global in the caller's process: Pyro's params, torch's dtype and device."""

    def __init__(self, function: Callable[[Any], Any], *, child: bool = True) -> None:
        store = pyro.get_param_store()
        self.function, self.caller = function, os.getpid() if child else None  # a cluster's are no children
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()
        self.params: StateDict | None = store.get_state() if len(store) else None

    def __call__(self, k: int, item: Any) -> tuple[int, Any]:
        """The index and the outcome, in another process."""
        global _IN_WORKER
        if not _IN_WORKER:
            _IN_WORKER = True
            if self.caller is not None:
                _follow(self.caller)
        with _ONE_AT_A_TIME:
            return k, self.here(item)

    def here(self, item: Any) -> Any:
        """The outcome, in this process."""
        before = torch.get_default_dtype(), torch.get_default_device()
        try:
            _set_defaults(self.dtype, self.device)
            with one_thread(), pyro.get_param_store().scope(deepcopy(self.params)):
                return self.function(item)
        finally:
            _set_defaults(*before)


def _set_defaults(dtype: torch.dtype, device: torch.device) -> None:
    torch.set_default_dtype(dtype)
    if torch.get_default_device() != device:
        # None is the processor, too, but does not slow down every call of torch.
        torch.set_default_device(None if device.type == "cpu" else device)


def _copied(item: Any) -> Any:
    try:
        return deepcopy(item)
    except Exception:  # nor could it be sent to another process
        return item


def _processes(workers: int | None) -> tuple[Any, int]:
    """Dask's client or None, and the number of processes; 1 is this process."""
    require_workers(workers)
    if workers == 1 or _IN_WORKER:
        return None, 1
    from joblib.parallel import (  # type: ignore[import-untyped]
        LokyBackend,
        SequentialBackend,
        get_active_backend,
    )

    backend, configured = get_active_backend()
    if backend.nesting_level or isinstance(backend, SequentialBackend):
        return None, 1
    client = getattr(backend, "client", None)
    if client is not None:
        require(not client.asynchronous, "client", client, "a Dask client that is not asynchronous")
        inside = _PROCESS in client.run(_this_process, on_error="ignore").values()
        require(not inside, "client", client, "one whose workers are other processes: Client(processes=True)")
        return client, 0
    if not isinstance(backend, LokyBackend):  # others wait for ever for a process that was killed
        raise invalid("backend", type(backend).__name__, "one that outlives its processes: loky or dask")
    wanted = configured if workers is None else workers
    return None, int(backend.effective_n_jobs(-1 if wanted is None else wanted))


def _this_process() -> str:
    return _PROCESS


def _on_joblib(n: int, call: RemoteCall, items: Sequence[Any], retries: int) -> Results[Any]:
    from joblib.externals.loky.process_executor import (  # type: ignore[import-untyped]
        TerminatedWorkerError,
    )

    killed = dict.fromkeys(range(len(items)), 0)
    waiting = list(killed)
    missing: list[int] = []
    while waiting:
        left = [k for k in waiting if killed[k] < max(retries, 1)] or waiting[:1]
        try:
            with _JOBLIB, closing(_once(n, call, [(k, items[k]) for k in left])) as outcomes:
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
            left_over = f"{len(waiting)} of {len(items)} are taken up in new ones"
            warnings.warn(f"a process was killed; {left_over}", RuntimeWarning, stacklevel=2)
    if missing:
        raise WorkerKilledError(sorted(missing))


def _once(n: int, call: RemoteCall, items: Sequence[tuple[int, Any]]) -> Results[Any]:
    """All of them, until a process is killed."""
    from joblib import Parallel, delayed

    parallel = Parallel(
        n_jobs=max(n, 2),  # joblib takes 1 for this process
        batch_size=1,
        max_nbytes=None,  # or large arrays would come as files that cannot be written to
        return_as="generator_unordered",
    )
    outcomes = parallel(delayed(call)(*item) for item in items)
    try:
        for outcome in outcomes:  # noqa: UP028  `yield from` would close it before we can
            yield outcome
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # joblib's, to callers who leave early
            outcomes.close()


def _on_dask(client: Any, call: RemoteCall, items: Sequence[Any]) -> Results[Any]:
    """By the client itself: joblib waits for ever for a task that Dask has given up."""
    from distributed import KilledWorker, as_completed

    def submit(k: int) -> Any:
        return client.submit(call, k, items[k], pure=False)

    tasks = {submit(k): k for k in range(len(items))}
    given_up, missing = [], []
    try:
        for task in as_completed(list(tasks)):
            k = tasks.pop(task)
            try:
                yield task.result()
            except KilledWorker:
                given_up.append(k)
        for k in given_up:  # once more, each by itself: others may have been to blame
            try:
                yield submit(k).result()
            except KilledWorker:
                missing.append(k)
    finally:
        client.cancel(list(tasks))
    if missing:
        raise WorkerKilledError(sorted(missing))


def _follow(caller: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the parent, and end when it is gone.

    It may be gone already: until the first call, a process imports what it needs, which takes seconds.
    """

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(SECONDS_BETWEEN_CHECKS)
        os._exit(1)  # nobody would hear of the outcome

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()
