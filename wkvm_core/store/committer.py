"""The one thread that owns the catalog: reads between groups, and groups of writes that become durable together."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import apsw

from wkvm_core.errors import Refused
from wkvm_core.store.changes import apply
from wkvm_core.store.index import Index
from wkvm_core.store.journal import Journal
from wkvm_core.store.records import Change, encode
from wkvm_proto.names import ErrorCode

T = TypeVar("T")

MAX_GROUP = 512
"""Writes in one commit."""
ANSWERS_KEPT_MS = 24 * 3600 * 1000


class Writing:
    """One transaction in the making: it sees its own changes and those of the group before it."""

    def __init__(self, index: Index, now_ms: int) -> None:
        self.index = index
        self.now_ms = now_ms
        self.changes: list[Change] = []

    def do(self, change: Change) -> None:
        """Makes a change and records it."""
        apply(self.index, change)
        self.changes.append(change)


class _Job(Generic[T]):
    def __init__(self, work: Callable[[Any], T], writes: bool) -> None:
        self.work = work
        self.writes = writes
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.result: T | None = None
        self.error: Exception | None = None

    def answer(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


class Committer:
    """Runs callers' reads and writes in its thread. A write is answered when the journal and the catalog hold it on
    the disk, a refused one when everything is there that it was refused for. When the disk fails nothing is written
    any more and reads go on."""

    def __init__(
        self, open_index: Callable[[], Index], open_journal: Callable[[Index], Journal], now_ms: Callable[[], int]
    ):
        """Returns when both are open in the thread; raises what opening raised."""
        self._open_index = open_index
        self._open_journal = open_journal
        self._now_ms = now_ms
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._chores: list[tuple[Iterator[None], Future[None]]] = []
        self._lock = threading.Lock()
        self._closed = False
        self.failure: str | None = None
        """Why nothing is written any more; None while all is well."""
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="wkvm-store-catalog", daemon=True)
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            self._thread.join()
            raise

    def read(self, work: Callable[[Index], T]) -> Future[T]:
        """Answers from what is committed."""
        return self._submit(_Job(work, writes=False))

    def write(self, work: Callable[[Writing], T]) -> Future[T]:
        """Runs `work` as one transaction: all of its changes or, when it raises, none."""
        return self._submit(_Job(work, writes=True))

    def chore(self, begin: Callable[[Index, Journal], Iterator[None]]) -> Future[None]:
        """Work in steps, one between two groups; done when the iterator ends."""
        done: Future[None] = Future()

        def start(index: Index) -> None:
            self._chores.append((begin(index, self._journal), done))

        def started(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                done.set_exception(error)

        done.set_running_or_notify_cancel()
        self.read(start).add_done_callback(started)
        return done

    def close(self) -> None:
        """Finishes what was submitted, drops chores and closes the files. A second close does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _submit(self, job: _Job[T]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise Refused(ErrorCode.DRAINING, "the store is closed")
            self._jobs.put(job)
        return job.future

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self, opened: Future[None]) -> None:
        try:
            self._index = self._open_index()
            try:
                self._journal = self._open_journal(self._index)
            except BaseException:
                self._index.close()
                raise
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while self._turn():
                pass
        finally:
            for steps, done in self._chores:
                _close(steps)
                done.set_exception(Refused(ErrorCode.DRAINING, "the store was closed"))
            self._journal.close()
            self._index.close()

    def _turn(self) -> bool:
        """One batch and one step of each chore; whether there may be another."""
        batch, goes_on = self._take()
        for job in batch:
            if not job.writes:
                self._attempt(job, self._index)
                job.answer()
        writes = [job for job in batch if job.writes]
        if writes:
            self._commit(writes)
            for job in writes:
                job.answer()
        for chore in list(self._chores):
            self._step(chore)
        return goes_on

    def _take(self) -> tuple[list[_Job[Any]], bool]:
        batch: list[_Job[Any]] = []
        while len(batch) < MAX_GROUP:
            try:
                job = self._jobs.get(block=not batch and not self._chores)
            except queue.Empty:
                break
            if job is None:
                return batch, False
            batch.append(job)
        return batch, True

    def _commit(self, jobs: list[_Job[Any]]) -> None:
        if self.failure is None:
            try:
                self._group(jobs)
                return
            except Exception as error:  # whatever it was, nobody waits for ever
                self.failure = f"a commit failed: {_reason(error)}"
                self._restore()
        for job in jobs:
            job.error = Refused(
                ErrorCode.STORE_READ_ONLY, "the store takes no more writes: its disk is full or failing"
            )

    def _group(self, jobs: list[_Job[Any]]) -> None:
        now_ms = self._now_ms()
        payloads = []
        self._index.begin()
        for job in jobs:
            writing = Writing(self._index, now_ms)
            try:
                with self._index.savepoint():
                    job.result = job.work(writing)
            except (OSError, apsw.Error):
                raise
            except Exception as error:
                job.error = error
                continue
            if writing.changes:
                payloads.append(encode(tuple(writing.changes)))
        if not payloads:
            self._index.roll_back()
            return
        self._index.forget_answers(now_ms - ANSWERS_KEPT_MS, 2 * len(jobs))
        self._index.commit(self._journal.append(payloads))

    def _restore(self) -> None:
        with contextlib.suppress(Refused, OSError, apsw.Error):  # reads say for themselves what they cannot read
            self._index.roll_back()

    def _attempt(self, job: _Job[Any], subject: Any) -> None:
        try:
            job.result = job.work(subject)
        except apsw.Error as error:
            job.error = Refused(ErrorCode.STORE_DAMAGED, f"the catalog cannot be read: {_reason(error)}")
        except Exception as error:
            job.error = error

    def _step(self, chore: tuple[Iterator[None], Future[None]]) -> None:
        steps, done = chore
        try:
            next(steps)
        except StopIteration:
            self._chores.remove(chore)
            done.set_result(None)
        except Exception as error:
            self._chores.remove(chore)
            done.set_exception(error)


def _close(steps: Iterator[None]) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def _reason(error: Exception) -> str:
    """What kind of failure it was, without the path that the system's text may name."""
    strerror = getattr(error, "strerror", None)
    return str(strerror) if strerror else type(error).__name__
