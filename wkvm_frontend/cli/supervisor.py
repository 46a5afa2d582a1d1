"""One core and its frontends on this machine: started together, restarted one by one, ended in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from wkvm_frontend.cli.child import Child, manner
from wkvm_frontend.cli.local_http import LocalHttp, status_line

EXIT_USAGE = 2
EXIT_BAD_CONFIG = 78
EXIT_FAILED = 70
MAX_FAILED_STARTS = 5
"""Before anything was ready."""
POLL_S = 0.1
PATIENCE_S = 5.0
"""Between two lines about a start that takes its time."""
STATUS_S = 10.0
GRACE_S = 5.0
"""On top of `drain_s`, before a program that does not end is killed."""


class Supervisor:
    """Runs until a signal, or until a program cannot be brought to work. Says everything through `say`."""

    def __init__(
        self,
        core: Child,
        frontends: Sequence[Child],
        server: LocalHttp,
        *,
        url: str,
        drain_s: float,
        say: Callable[[str], None],
        close_listener: Callable[[], None],
    ) -> None:
        self._core = core
        self._frontends = frontends
        self._server = server
        self._url = url
        self._drain_s = drain_s
        self._say = say
        self._close_listener = close_listener
        self._stopping = asyncio.Event()
        self._exit_code = 0
        self._was_ready = False
        self._ended: set[str] = set()
        """Programs that ended since the last time everything was ready."""

    async def run(self) -> int:
        """The exit code: 0 after a signal, that of the program which gave up otherwise."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._signalled)
        children = (self._core, *self._frontends)
        keepers = {child: asyncio.create_task(self._keep(child)) for child in children}
        watcher = asyncio.create_task(self._watch())
        await self._stopping.wait()
        watcher.cancel()
        self._close_listener()
        await self._end([keepers[child] for child in self._frontends], self._frontends)
        await self._end([keepers[self._core]], [self._core])
        return self._exit_code

    def _signalled(self) -> None:
        if self._stopping.is_set():
            for child in (self._core, *self._frontends):
                child.send(signal.SIGKILL)
            return
        self._say("stopping; the second Ctrl-C ends everything at once")
        self._stopping.set()

    def _give_up(self, code: int, why: str) -> None:
        if not self._stopping.is_set():
            self._say(why)
            self._exit_code = code
            self._stopping.set()

    # ---------------------------------------------------------------------------------------------- the programs

    async def _keep(self, child: Child) -> None:
        while not self._stopping.is_set():
            try:
                code = await child.run()
            except OSError as error:
                self._give_up(EXIT_FAILED, f"{child.name} cannot be started: {error.strerror}")
                return
            self._ended.add(child.name)
            if self._stopping.is_set():
                return
            if code in (EXIT_USAGE, EXIT_BAD_CONFIG):
                self._give_up(code, f"{child.name} refuses its settings, as it says above")
            elif not self._was_ready and child.failures >= MAX_FAILED_STARTS:
                self._give_up(EXIT_FAILED, f"{child.name} {manner(code)}, {child.failures} times in a row; giving up")
            else:
                self._say(f"{child.name} {manner(code)}; it starts again in {child.delay_s:.2g} s")
                await self._pause(child.delay_s)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    async def _end(self, keepers: Sequence[asyncio.Task[None]], children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=self._drain_s + GRACE_S)
        if late:
            self._say(f"{', '.join(child.name for child in children if child.pid)} did not end in time; killed")
            for child in children:
                child.send(signal.SIGKILL)
            await asyncio.wait(keepers)

    # ---------------------------------------------------------------------------------------------- what it says

    async def _watch(self) -> None:
        while True:
            await self._until_ready()
            await self._while_ready()

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        begun = told = loop.time()
        while True:
            self._ended.clear()
            if await self._server.ready() and not self._ended:
                break
            if loop.time() - told >= PATIENCE_S:
                told = loop.time()
                self._say(f"not ready yet after {told - begun:.0f} s")
            await asyncio.sleep(POLL_S)
        took = loop.time() - begun
        if self._was_ready:
            self._say(f"ready again after {took:.1f} s")
        else:
            model = await self._server.model()
            self._say(f"ready after {took:.1f} s: {model or 'the model'} at {self._url}/v1")
        self._was_ready = True

    async def _while_ready(self) -> None:
        """Until a program ends; a line now and then while there is load."""
        before = await self._server.metrics() or {}
        waited = 0.0
        while not self._ended:
            await asyncio.sleep(POLL_S)
            waited += POLL_S
            if waited >= STATUS_S:
                now = await self._server.metrics()
                line = status_line(before, now, waited) if now is not None else None
                if line:
                    self._say(line)
                before, waited = now or {}, 0.0
