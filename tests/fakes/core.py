"""Scheduler, runner and a real model on the CPU, without processes: what `wkvm-core` composes, stepped by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.eager import EagerStepper
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.runner import Runner
from wkvm_core.exec.sampler import Sampler
from wkvm_core.exec.stepper import Stepper
from wkvm_core.models.protocol import Model
from wkvm_core.sched.limits import Limits
from wkvm_core.sched.outcomes import Failure, Finish
from wkvm_core.sched.plan import RowLogprobs
from wkvm_core.sched.request import Request
from wkvm_core.sched.scheduler import Scheduler
from wkvm_core.sched.stops import StopCompiler, VocabularyBytes
from wkvm_core.state.arena import Arena, Blocks
from wkvm_core.state.snapshot import Snapshot
from wkvm_core.store.host import HostArena
from wkvm_proto.columns import pack_u32
from wkvm_proto.sampling import Sampling


@dataclass
class Answer:
    """What one sample got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    failure: Failure | None = None


class Core:
    """One model, one bank."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        blocks: int = 32,
        rows: int = 8,
        step_tokens: int = 64,
        chunk_tokens: int = 32,
        slice_tokens: int = 0,
        overlap: int = 0,
        vocabulary: list[bytes] | None = None,
        device: torch.device | str = "cpu",
        graphs: bool = False,
        buckets: tuple[int, ...] = (),
    ) -> None:
        """graphs: run by the GPU's stepper, captured where the device is one."""
        device = torch.device(device)
        self.model = model
        self.bank = StateBank(model.layout, slots, device)
        self.lanes: Lanes = Lanes.open(rows, model.vocab_size, device)
        self.host = HostArena(blocks, model.layout.slot_bytes)
        self.arena, self.blocks = Arena(slots), Blocks(blocks)
        step_tokens = max(step_tokens, rows)
        limits = Limits(rows, step_tokens, chunk_tokens, 10_000, 10**9, slice_tokens)
        self.scheduler = Scheduler(self.arena, self.blocks, limits, model.fingerprint)
        stepper: Stepper = EagerStepper(model, self.bank, self.lanes, Sampler(self.lanes))
        if graphs:
            from wkvm_core.exec.device_lanes import DeviceLanes
            from wkvm_core.exec.graph_stepper import GraphStepper, Side

            self.lanes = lanes = DeviceLanes(rows, model.vocab_size, device, rows)
            decoding = Side.open(model, lanes, rows, rows)
            reading = Side.open(model.twin(), lanes, step_tokens, rows + 1)
            readings = ((16, 1), (32, 4)) if step_tokens >= 32 and rows >= 4 else ()
            stepper = GraphStepper.open(decoding, reading, self.bank, lanes, step_tokens, buckets or (rows,), readings)
        self.runner = Runner(self.bank, self.lanes, stepper, self.host.view)
        table = vocabulary or [bytes([byte]) for byte in range(256)]
        self.compiler = StopCompiler(VocabularyBytes(table), model.vocab_size)
        self.overlap = overlap
        self.answers: dict[tuple[int, int], Answer] = {}
        self._number = 0

    def submit(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        stop: tuple[bytes, ...] = (),
        stop_ids: tuple[int, ...] = (),
        keep: bool = False,
        origin: Snapshot | None = None,
        priority: int = 0,
        tenant: str = "t",
        **sampling: Any,
    ) -> int:
        """Submits and returns the request's number."""
        self._number += 1
        if origin is not None:
            self.blocks.retain(origin.block)
        sampling.setdefault("max_tokens", 8)
        sampling.setdefault("temperature", 0.0)
        request = Request(
            number=self._number,
            client=None,
            tenant=tenant,
            prompt=pack_u32(prompt),
            sampling=Sampling(stop_ids=pack_u32(stop_ids), **sampling),
            n=n,
            stops=self.compiler.compile(stop) if stop else None,
            vocabulary=self.compiler.vocabulary if stop else None,
            origin=origin,
            keep=keep,
            priority=priority,
        )
        self.scheduler.submit(request)
        for sample in range(n):
            self.answers[self._number, sample] = Answer()
        return self._number

    def turn(self) -> None:
        """One turn of the step loop."""
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            plan.check()
            self.runner.launch(plan)
        in_flight = self.scheduler.in_flight
        if in_flight > self.overlap or (plan is None and in_flight):
            self.scheduler.commit(self.runner.collect(), 0.0)
        out = self.scheduler.take()
        for index, ((request, sample), token) in enumerate(zip(out.owners, out.ids, strict=True)):
            answer = self.answers[request.number, sample]
            answer.tokens.append(token)
            if index in out.logprobs:
                answer.logprobs.append(out.logprobs[index])
        for finish in out.finished:
            self.answers[finish.request.number, finish.sample].finish = finish
        for failure in out.failed:
            for sample in range(failure.request.n):
                self.answers[failure.request.number, sample].failure = failure

    def run(self, turns: int = 100_000) -> None:
        """Until every request is answered."""
        for _ in range(turns):
            if not self.scheduler.num_requests and not self.scheduler.in_flight:
                assert self.arena.used == 0
                assert not self.bank.bytes[0].any(), "the zero slot was written"
                return
            self.turn()
        raise AssertionError("not every request is answered")

    def kept(self, number: int) -> bytes:
        """The bytes of the state kept at a request's end."""
        finish = self.answers[number, 0].finish
        assert finish is not None and finish.snapshot is not None
        return bytes(self.host.view(finish.snapshot.block))
