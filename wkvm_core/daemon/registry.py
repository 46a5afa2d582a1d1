"""Named states, for frontends that ask and for requests that begin or end at them. Runs on the step loop's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from wkvm_core.daemon.desk import failed
from wkvm_core.daemon.inbox import Ask
from wkvm_core.daemon.workshop import Workshop
from wkvm_core.errors import Refused
from wkvm_core.state.arena import Blocks
from wkvm_core.state.layout import Fingerprint, StateLayout
from wkvm_core.state.snapshot import Snapshot
from wkvm_core.store.catalog import Catalog, Named, Origin
from wkvm_core.store.mutation import distances, mutate, rule_of
from wkvm_proto.messages import (
    DiffStates,
    Distances,
    DropState,
    Event,
    ForkState,
    ListStates,
    MutateState,
    ShowState,
    StateRecord,
    States,
)
from wkvm_proto.names import BadHandle, ErrorCode, check_name, parse_handle

Post = Callable[[bytes, Event], None]


class Registry:
    """Answers calls about states; what reads their bytes goes to the workshop, with references held meanwhile."""

    def __init__(
        self,
        catalog: Catalog,
        blocks: Blocks,
        view: Callable[[int], memoryview],
        fingerprint: Fingerprint,
        layout: StateLayout,
        workshop: Workshop,
        post: Post,
    ) -> None:
        """view: the bytes of a block of the host arena."""
        self._catalog = catalog
        self._blocks = blocks
        self._view = view
        self._fingerprint = fingerprint
        self._layout = layout
        self._workshop = workshop
        self._post = post

    def find(self, tenant: str, handle: str) -> Named:
        """A state that this model can go on from. Refuses an unknown one and one of another model."""
        named = self._catalog.find(tenant, handle)
        ours, theirs = self._fingerprint, named.snapshot.fingerprint
        if (ours.model, ours.layout) != (theirs.model, theirs.layout):
            raise Refused(ErrorCode.FINGERPRINT_MISMATCH, "the state belongs to another model", param="state")
        if ours.numerics != theirs.numerics:
            raise Refused(ErrorCode.NUMERICS_MISMATCH, "the state was computed with other numerics", param="state")
        return named

    def save(self, tenant: str, name: str, snapshot: Snapshot, parents: tuple[str, ...]) -> str:
        """Names the state at a request's end; its handle. Takes over the reference to its block."""
        return str(self._catalog.save(tenant, name, snapshot, Origin("save", parents)))

    def answer(self, item: Ask) -> None:
        """Does what a call asks, and says what came of it, now or when it is done."""
        call, catalog, after = item.call, self._catalog, 0
        try:
            match call:
                case MutateState():
                    self._mutate(item.client, call)
                    return
                case DiffStates():
                    self._diff(item.client, call)
                    return
                case ListStates():
                    found, after = catalog.page(
                        call.tenant, name=call.name, prefix=call.prefix, after=call.after, limit=call.limit
                    )
                case ShowState():
                    found = [catalog.find(call.tenant, call.state)]
                case ForkState():
                    found = catalog.fork(call.tenant, call.state, call.names)
                case DropState():
                    found = catalog.drop(call.tenant, call.state, every=call.every)
        except Refused as refused:
            self._post(item.client, failed(call.request, refused))
            return
        self._post(item.client, States(call.request, tuple(self._record(named) for named in found), after))

    def _mutate(self, client: bytes, call: MutateState) -> None:
        own = self.find(call.tenant, call.state)
        try:
            name = check_name(call.name or parse_handle(call.state)[0])
        except BadHandle as error:
            raise Refused(ErrorCode.BAD_REQUEST, str(error), param="name") from None
        try:
            params = msgspec.msgpack.decode(call.params, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise Refused(ErrorCode.BAD_REQUEST, "the parameters are no map", param="params") from None
        rule = rule_of(call.rule, params, self._layout)
        others = [self.find(call.tenant, handle) for handle in rule.others]
        if not self._blocks.free:
            raise Refused(ErrorCode.NOT_ENOUGH_MEMORY, "no host memory is left for another state", param="name")
        made = self._blocks.acquire()
        held = [named.snapshot.block for named in (own, *others)]
        for block in held:
            self._blocks.retain(block)
        views = [self._view(block) for block in held]

        def work() -> dict[str, dict[str, float]]:
            return mutate(rule, self._layout, views[0], views[1:], self._view(made))

        def then(norms: dict[str, dict[str, float]] | Refused) -> None:
            for block in held:
                self._blocks.release(block)
            if isinstance(norms, Refused):
                self._blocks.release(made)
                self._post(client, failed(call.request, norms))
                return
            parents = tuple(str(named.handle) for named in (own, *others))
            origin = Origin("mutate", parents, call.rule, call.params, norms)
            snapshot = msgspec.structs.replace(own.snapshot, block=made)
            handle = self._catalog.save(call.tenant, name, snapshot, origin)
            record = self._record(self._catalog.find(call.tenant, str(handle)))
            self._post(client, States(call.request, (record,)))

        self._workshop.put(work, then)

    def _diff(self, client: bytes, call: DiffStates) -> None:
        held = [self.find(call.tenant, handle).snapshot.block for handle in (call.one, call.other)]
        for block in held:
            self._blocks.retain(block)
        one, other = (self._view(block) for block in held)

        def then(told: dict[str, tuple[float, ...]] | Refused) -> None:
            for block in held:
                self._blocks.release(block)
            if isinstance(told, Refused):
                self._post(client, failed(call.request, told))
            else:
                self._post(client, Distances(call.request, told))

        self._workshop.put(lambda: distances(self._layout, one, other), then)

    def _record(self, named: Named) -> StateRecord:
        origin = named.origin
        return StateRecord(
            handle=str(named.handle),
            tokens=named.snapshot.cursor.tokens,
            size_bytes=self._layout.slot_bytes,
            created=named.created,
            verb=origin.verb,
            parents=origin.parents,
            rule=origin.rule,
            params=origin.params,
            norms=origin.norms,
        )
