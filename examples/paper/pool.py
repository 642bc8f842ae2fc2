"""Tasks in several processes, longest first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.experiments.execute import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from examples.paper.tasks import Store, Task

PATIENCE = 10.0  # seconds that a process has to end by itself
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run(tasks: Sequence[Task], store: Store, workers: int, progress: Callable[[str], None]) -> dict[str, str]:
    """Do what is not done yet.

    A task that fails stops only those that need it. With one worker, everything happens in this process.

    Args:
        tasks: With all that they need, each once.
        store: Where outcomes are kept.
        workers: How many processes.
        progress: Given a line for every task that is over.

    Returns:
        What went wrong, by the names of tasks.
    """
    agenda = Agenda(tasks, store, progress)
    for name in THREADS:  # inherited by processes, and read when they import NumPy and torch
        os.environ[name] = "1"
    if workers == 1:
        _run_here(agenda, store)
    else:
        _run_in_processes(agenda, store, workers)
    return agenda.failures


class Agenda:
    """What is left to do.

    Args:
        tasks: With all that they need, each once.
        store: Where outcomes are kept.
        progress: Given a line for every task that is over.
    """

    def __init__(self, tasks: Sequence[Task], store: Store, progress: Callable[[str], None]) -> None:
        self.store = store
        self.progress = progress
        unfinished = [task for task in tasks if not store.finished(task)]
        self.unfinished = {task.key(store.source) for task in unfinished}
        self.waiting = sorted(unfinished, key=lambda task: -task.seconds)
        self.left = len(self.waiting)
        self.failures: dict[str, str] = {}

    def next(self) -> Task | None:
        """The longest task whose needs are met, taken off the list."""
        for task in self.waiting:
            if not any(need.key(self.store.source) in self.unfinished for need in task.needs):
                self.waiting.remove(task)
                return task
        return None

    def done(self, task: Task, seconds: float) -> None:
        """Take note that a task is over."""
        self.unfinished.remove(task.key(self.store.source))
        self.left -= 1
        self.progress(f"{task.name}: {seconds:.0f} s; {self.left} left")

    def failed(self, task: Task, reason: str) -> None:
        """Take note that a task failed."""
        self.left -= 1
        self.failures[task.name] = reason
        self.progress(f"{task.name}: failed; {self.left} left")


def _run_here(agenda: Agenda, store: Store) -> None:
    with one_thread():
        while (task := agenda.next()) is not None:
            try:
                agenda.done(task, store.carry_out(task))
            except Exception:
                agenda.failed(task, traceback.format_exc())


@dataclass
class Worker:
    """A process, the way to talk to it, and what it is at."""

    process: Any
    connection: Connection
    task: Task | None = None

    @staticmethod
    def started(store: Store) -> Worker:
        """A new one."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, store), daemon=True)
        # Ctrl-C is for the process that everybody hears from; what is ignored stays ignored in a new process.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()  # or nobody would notice that the process is gone
        return Worker(process, ours)

    def begin(self, task: Task) -> None:
        """Set it to work.

        Raises:
            ConnectionError: If the process is gone.
        """
        self.connection.send(task)
        self.task = task

    def stop(self) -> None:
        """End it, in the middle of whatever it does."""
        self.connection.close()  # with nothing to do, it ends by itself, and tidies up
        if self.task is None:
            self.process.join(PATIENCE)
        self.process.kill()  # files are written at once or not at all
        self.process.join()


def _run_in_processes(agenda: Agenda, store: Store, workers: int) -> None:
    pool: list[Worker] = []
    try:
        while True:
            idle = [worker for worker in pool if worker.task is None]
            while (idle or len(pool) < workers) and (task := agenda.next()) is not None:
                _hand_over(task, pool, idle, store)
            busy = {worker.connection: worker for worker in pool if worker.task is not None}
            if not busy:
                return
            for ready in connection.wait(list(busy)):
                _hear(pool, busy[ready], agenda)  # type: ignore[index]
    finally:
        for worker in pool:
            worker.stop()


def _hand_over(task: Task, pool: list[Worker], idle: list[Worker], store: Store) -> None:
    """Give a task to one of those with nothing to do, or else to a new one."""
    while idle:
        worker = idle.pop()
        try:
            worker.begin(task)
        except ConnectionError:  # it has ended since its last task: no fault of this one's
            _strike_off(pool, worker)
        else:
            return
    worker = Worker.started(store)
    pool.append(worker)
    try:
        worker.begin(task)
    except ConnectionError:  # it cannot even start: heard of, as one that ended at its task
        worker.task = task


def _hear(pool: list[Worker], worker: Worker, agenda: Agenda) -> None:
    """Take in what a worker says, or strike it off if it is gone."""
    task, worker.task = worker.task, None
    assert task is not None
    try:
        seconds, reason = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        agenda.failed(task, f"its process ended with exit code {worker.process.exitcode}")
        _strike_off(pool, worker)
        return
    if reason is None:
        agenda.done(task, seconds)
    else:
        agenda.failed(task, reason)


def _strike_off(pool: list[Worker], worker: Worker) -> None:
    pool.remove(worker)
    worker.stop()


def serve(tasks: Connection, store: Store) -> None:
    """A worker's life: carry out what it is sent, until there is no one to send any more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the other processes have the other cores
    while True:
        try:
            task = tasks.recv()
        except EOFError:
            return
        try:
            tasks.send((store.carry_out(task), None))
        except Exception:
            tasks.send((0.0, traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
