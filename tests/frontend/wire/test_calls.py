"""Events of a core to the requests that wait for them."""

from __future__ import annotations

import asyncio

import pytest

from wkvm_frontend.wire.calls import CallTable
from wkvm_frontend.wire.inbox import Inbox, Row
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.messages import Accepted, BadFrame, Failed, Finished, TokenLogprobs, Tokens
from wkvm_proto.names import ErrorCode, FinishReason


def finished(request: int, sample: int) -> Finished:
    return Finished(request, sample, FinishReason.LENGTH, 1, 1, 1, 2)


def test_rows_reach_the_calls_that_they_belong_to() -> None:
    async def story() -> None:
        table, one, two = CallTable(), Inbox(), Inbox()
        first, second = table.open(1, one, 0), table.open(2, two, 7)
        requests = pack_u32([first.request, second.request, 999, second.request])
        event = Tokens(1, requests, pack_u32([10, 20, 21, 5, 30]), pack_u32([1, 2, 1, 1]), pack_u32([0, 0, 0, 1]))
        assert table.deliver(event) == []
        assert await one.take() == [(0, Row(0, [10]))]
        assert await two.take() == [(7, Row(0, [20, 21])), (7, Row(1, [30]))]

    asyncio.run(story())


def test_logprobs_ride_with_their_row() -> None:
    async def story() -> None:
        table, inbox = CallTable(), Inbox()
        call = table.open(1, inbox, 0)
        part = TokenLogprobs(0, pack_f32([-1.0, -2.0]), pack_u32([1, 2, 3, 4]), pack_f32([-0.5, -1.5, -2.5, -3.5]))
        table.deliver(Tokens(1, pack_u32([call.request]), pack_u32([1, 3]), pack_u32([2]), b"", (part,)))
        row = (await inbox.take())[0][1]
        assert isinstance(row, Row)
        assert row.logprobs is not None
        assert row.logprobs.chosen == [-1.0, -2.0]
        assert row.logprobs.best == [[(1, -0.5), (2, -1.5)], [(3, -2.5), (4, -3.5)]]

    asyncio.run(story())


@pytest.mark.parametrize(
    "event",
    [
        Tokens(1, b"abc", b""),
        Tokens(1, pack_u32([1]), b""),
        Tokens(1, pack_u32([1]), pack_u32([1, 2])),
        Tokens(1, pack_u32([1]), pack_u32([1]), pack_u32([1, 1])),
        Tokens(1, pack_u32([1]), pack_u32([1]), b"", pack_u32([0, 0])),
        Tokens(1, pack_u32([1]), pack_u32([1]), b"", b"", (TokenLogprobs(0, b"abc"),)),
        Tokens(1, pack_u32([1]), pack_u32([1]), b"", b"", (TokenLogprobs(0, pack_f32([1, 2])),)),
    ],
)
def test_columns_that_disagree_are_a_bad_frame(event: Tokens) -> None:
    async def story() -> None:
        table = CallTable()
        assert table.open(1, Inbox(), 0).request == 1
        with pytest.raises(BadFrame):
            table.deliver(event)

    asyncio.run(story())


def test_a_call_ends_with_its_last_sample() -> None:
    async def story() -> None:
        table, inbox = CallTable(), Inbox()
        call = table.open(2, inbox, 0)
        table.accept(Accepted(call.request, 1))
        table.finish(finished(call.request, 0))
        assert (len(table), table.live_samples) == (1, 1)
        table.finish(finished(call.request, 1))
        table.finish(finished(call.request, 1))
        assert (len(table), table.live_samples) == (0, 0)
        assert len(await inbox.take()) == 3
        assert not table.close(call)

    asyncio.run(story())


def test_a_call_that_was_given_up_hears_nothing_more() -> None:
    async def story() -> None:
        table, inbox = CallTable(), Inbox()
        call = table.open(1, inbox, 0)
        assert table.close(call)
        table.deliver(Tokens(1, pack_u32([call.request]), pack_u32([1])))
        table.end(Failed(call.request, ErrorCode.DEADLINE, "late"))
        inbox.leave()
        assert await inbox.take() == []
        assert table.live_samples == 0

    asyncio.run(story())


def test_a_full_inbox_ends_its_call_and_no_other() -> None:
    async def story() -> None:
        table, small, large = CallTable(), Inbox(2), Inbox()
        slow, quick = table.open(1, small, 0), table.open(1, large, 0)
        event = Tokens(1, pack_u32([slow.request, quick.request]), pack_u32([1, 2]))
        assert table.deliver(event) == []
        assert table.deliver(event) == []
        assert table.deliver(event) == [slow]
        assert len(table) == 1
        items = [item for _, item in await small.take()]
        assert items[:2] == [Row(0, [1]), Row(0, [1])]
        assert isinstance(items[2], Failed)
        assert items[2].code is ErrorCode.SLOW_CONSUMER

    asyncio.run(story())


def test_ids_of_live_calls_are_not_given_out_again() -> None:
    async def story() -> None:
        table = CallTable()
        first = table.open(1, Inbox(), 0)
        table._next = first.request
        assert table.open(1, Inbox(), 0).request != first.request

    asyncio.run(story())


def test_losing_the_core_fails_every_call() -> None:
    async def story() -> None:
        table, inbox = CallTable(), Inbox()
        for index in range(3):
            table.open(1, inbox, index)
        assert table.fail_all(ErrorCode.ENGINE_RESTARTED, "gone", 1.0) == 3
        assert [index for index, _ in await inbox.take()] == [0, 1, 2]
        assert table.live_samples == 0

    asyncio.run(story())
