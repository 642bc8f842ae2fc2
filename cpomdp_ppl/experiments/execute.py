"""The same thing done to many, side by side on joblib: one thread each, and whoever is killed is replaced."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import threading
import time
import traceback
import warnings
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import pyro
import torch

from cpomdp_ppl.errors import as_integer, invalid, require, require_count

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.missing,)


def in_parallel(
    function: Callable[[Item], Outcome],
    items: Iterable[Item],
    *,
    workers: int | None = None,
    retries: int = RETRIES,
    name: str | None = None,
    copies: bool = True,
) -> Results[Outcome]:
    """Do the same to many things, and yield each outcome with its item's index as soon as it is there.

    Each is done by a single thread, on a copy of the item and of Pyro's params, with the caller's default
    dtype and device, so that bits do not depend on how many there are at work, and nothing that is done to
    items, params, environment, filters of warnings or the current directory reaches the caller. Random
    numbers are the function's own affair; on Dask, those of Python's `random` are not, as threads of Dask's
    own draw from it, too.

    When a process is killed, those items that it may have been at are taken up again, after all others. The
    last time, each has a process to itself: who is killed then has nobody else to blame, and nobody is lost
    in bad company. On Dask it is the scheduler that does this, and `allowed-failures` that says how often.

    Joblib's processes serve one thread of the caller at a time; another waits until the first is through.

    Args:
        function: Of one item, which is its own to change; it is not to change itself. What it raises ends
            all of it.
        items: Sent to processes by (cloud)pickle, as is the function. In this process, what cannot be copied
            is given as it is.
        workers: How many processes. One is this process itself, without joblib. None is what joblib is
            configured for, or as many as there are cores. Inside `joblib.parallel_config(backend="dask")`
            it is the cluster that decides. Inside a function that is itself one of many, here or in joblib's
            own `Parallel`, it is always this process.
        retries: How often an item may be taken up again.
        name: What Dask's dashboard is to call it; the function's own name if left out.
        copies: Whether items are copied in this process, too. Without, what the function does to them is
            there afterwards, but only if it was done here.

    Raises:
        WorkerKilledError: If that was not often enough; after all the others.

    Example:
        >>> dict(in_parallel(lambda number: number**2, [1, 2, 3], workers=1))
        {0: 1, 1: 4, 2: 9}
    """
    require_retries(retries)
    backend, n = _backend(workers)
    items = list(items)
    call = Alone(function)
    if backend is None:
        return _here(call, items, copies)
    client = getattr(backend, "client", None)
    if client is not None:
        own = str(getattr(function, "__name__", type(function).__name__))
        return _on_dask(client, call, items, own if name is None else name)
    return _on_joblib(min(n, len(items)), call, items, int(retries))


def stays_here(workers: int | None) -> bool:
    """Whether `in_parallel` would use this process alone; raises what it would raise."""
    return _backend(workers)[0] is None


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


@dataclass(frozen=True)
class Packed:
    """A value on its way to other processes, which is unpickled when it is asked for and not before.

    Attributes:
        content: Of (cloud)pickle.
    """

    content: bytes

    @staticmethod
    def of(value: Any) -> Packed:
        """Pickle a value, as joblib would."""
        from joblib.externals.loky.backend.reduction import dumps  # type: ignore[import-untyped]

        return Packed(bytes(dumps(value)))

    def unpacked(self) -> Any:
        """The value, a new one each time."""
        return pickle.loads(self.content)


@contextmanager
def filters_kept() -> Iterator[None]:
    """Outside, the filters of warnings are what they were, whatever is imported inside and adds its own."""
    with warnings.catch_warnings():
        yield


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
_PROCESSES = threading.RLock()  # joblib has one set of them, which all go when one call is broken off
_FOLLOWED: set[int] = set()
_TOKEN = secrets.token_hex(8)


class Alone:
    """A function as it is called for one of many: with one thread, and with what is global in the caller's.

    Args:
        function: Of one item.
    """

    def __init__(self, function: Callable[[Item], Any]) -> None:
        store = pyro.get_param_store()
        self.function, self.caller = function, os.getpid()
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()
        self.params: StateDict | None = store.get_state() if len(store) else None

    def __call__(self, k: int, item: Any) -> tuple[int, Any]:
        """The index, and the outcome; in another process."""
        _follow(self.caller)
        with _TURN:  # a Dask worker may have several threads, but there is one state of the generators
            try:
                return k, self.here(item)
            except Exception as error:
                if _survives(error):
                    raise
                words = "".join(traceback.format_exception(error))
        raise RuntimeError(words)  # not from in there, where it would have the error as its context

    def here(self, item: Any) -> Any:
        """The outcome; in this process, of which nothing else is changed."""
        params = self.params
        if params is not None:
            params = {"params": deepcopy(params["params"]), "constraints": dict(params["constraints"])}
        with (
            one_thread(),
            pyro.get_param_store().scope(params),
            filters_kept(),
            np.errstate(),
            _environment(),
            _defaults(self.dtype, self.device),
        ):
            before, _INSIDE.now = _INSIDE.now, True
            try:
                return self.function(item)
            finally:
                _INSIDE.now = before


@contextmanager
def _environment() -> Iterator[None]:
    """Outside, the environment and the current directory are what they were."""
    variables, directory = dict(os.environ), None
    with suppress(OSError):  # it may have been removed
        directory = os.getcwd()
    try:
        yield
    finally:
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)
        if directory is not None:
            with suppress(OSError):
                os.chdir(directory)


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside, torch's defaults are these; outside, what they were."""
    before = torch.get_default_dtype(), torch.get_default_device()
    try:
        _set_defaults(dtype, device)
        yield
    finally:
        _set_defaults(*before)


def _set_defaults(dtype: torch.dtype, device: torch.device) -> None:
    torch.set_default_dtype(dtype)
    if torch.get_default_device() != device:
        # None is the processor, too, but does not slow down every call of torch.
        torch.set_default_device(None if device.type == "cpu" else device)


def _survives(error: Exception) -> bool:
    """Whether an error is still the same after the way between processes."""
    try:
        again = Packed.of(error).unpacked()
    except Exception:
        return False
    return type(again) is type(error) and str(again) == str(error)


def _here(call: Alone, items: Sequence[Any], copies: bool) -> Results[Any]:
    for k, item in enumerate(items):
        yield k, call.here(_copied(item) if copies else item)


def _copied(item: Any) -> Any:
    try:
        return deepcopy(item)
    except Exception:  # nor could it be sent to another process
        return item


def _backend(workers: int | None) -> tuple[Any, int]:
    """Joblib's active backend and how many processes it will have; None if that is this process."""
    require_workers(workers)
    if workers == 1 or _INSIDE.now:
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
        _require_processes(client)
    elif not isinstance(backend, LokyBackend):  # who waits for ever for a process that was killed
        raise invalid("backend", type(backend).__name__, "one that outlives its processes: loky or dask")
    wanted = configured if workers is None else workers
    n = backend.effective_n_jobs(-1 if wanted is None else wanted)
    return (None, 1) if n == 1 and client is None else (backend, n)


def _require_processes(client: Any) -> None:
    require(not client.asynchronous, "client", client, "a Dask client that is not asynchronous")
    inside = _this_process() in client.run(_this_process, on_error="ignore").values()
    require(not inside, "client", client, "one whose workers are other processes: Client(processes=True)")


def _this_process() -> tuple[str, int]:
    return _TOKEN, os.getpid()  # on another machine, somebody may have the same number


def _on_joblib(n: int, call: Alone, items: Sequence[Any], retries: int) -> Results[Any]:
    from joblib.externals.loky.process_executor import (  # type: ignore[import-untyped]
        TerminatedWorkerError,
    )

    killed = dict.fromkeys(range(len(items)), 0)
    waiting = list(killed)
    missing: list[int] = []
    while waiting:
        left = [k for k in waiting if killed[k] < max(retries, 1)] or waiting[:1]
        try:
            with _PROCESSES, closing(_once(n, call, [(k, items[k]) for k in left])) as outcomes:
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


def _once(n: int, call: Alone, items: Sequence[tuple[int, Any]]) -> Results[Any]:
    """All of them, until somebody is killed."""
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
            warnings.simplefilter("ignore")  # it tells those who leave early that they might have known
            outcomes.close()


def _on_dask(client: Any, call: Alone, items: Sequence[Any], name: str) -> Results[Any]:
    """By the client itself: joblib waits for ever for a task that Dask has given up."""
    from distributed import KilledWorker, as_completed

    tasks: dict[Any, int] = {}
    completed = as_completed()
    rest = enumerate(items)

    def submit(k: int) -> None:
        task = client.submit(call, k, items[k], key=f"{name}-{secrets.token_hex(16)}", pure=False)
        tasks[task] = k
        completed.add(task)

    def submit_some() -> None:
        """Two for each thread that there is now: the scheduler holds what it is sent in memory."""
        many = 2 * max(sum(client.nthreads().values()), 1)
        for k, _ in islice(rest, max(many - len(tasks), 0)):
            submit(k)

    given_up: list[int] = []
    alone: set[int] = set()
    missing: list[int] = []
    try:
        submit_some()
        for task in completed:
            k = tasks.pop(task)
            submit_some()
            try:
                _, outcome = task.result()
            except KilledWorker:
                (missing if k in alone else given_up).append(k)
            else:
                yield k, outcome
            if given_up and not tasks:  # once more by itself: others may have been to blame
                alone.add(given_up[0])
                submit(given_up.pop(0))
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
