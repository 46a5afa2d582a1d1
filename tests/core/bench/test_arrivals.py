from __future__ import annotations

import numpy as np
import pytest

from wkvm_core.bench.arrivals import Arrivals
from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import Tokens


def frame(*requests: int, counts: tuple[int, ...] = ()) -> Tokens:
    ids = [7] * (sum(counts) or len(requests))
    return Tokens(1, pack_u32(requests), pack_u32(ids), pack_u32(counts) if counts else b"")


def test_time_to_the_first_token_runs_from_sending_each_request() -> None:
    arrivals = Arrivals(3)
    arrivals.sent[:] = [1.0, 1.1, 1.2]
    arrivals.take(frame(1), 2.0)
    arrivals.take(frame(0, 1, 2), 3.0)
    arrivals.take(frame(0, 1, 2), 4.0)
    assert arrivals.ttft == pytest.approx([2.0, 0.9, 1.8])


def test_gaps_are_taken_while_all_requests_run() -> None:
    arrivals = Arrivals(2)
    arrivals.take(frame(0), 1.0)
    arrivals.take(frame(0, 1), 2.0)  # not all ran before
    arrivals.take(frame(0, 1), 2.5)
    arrivals.take(frame(1), 4.0)
    arrivals.take(frame(0), 5.0)
    arrivals.finish()
    arrivals.take(frame(1), 9.0)  # not all run any more
    assert arrivals.itl.tolist() == [0.5, 0.5, 1.5, 2.5]


def test_the_first_fifth_of_the_gaps_is_left_out() -> None:
    arrivals = Arrivals(1)
    moments = np.cumsum([1.0, *[5.0] * 4, *[2.0] * 16])
    for moment in moments:
        arrivals.take(frame(0), moment)
    assert arrivals.itl.tolist() == [2.0] * 16


def test_several_tokens_of_a_request_in_a_frame_are_counted_and_are_one_gap() -> None:
    arrivals = Arrivals(2)
    arrivals.take(frame(0, 1, counts=(1, 3)), 1.0)
    arrivals.take(frame(0, 1, counts=(2, 2)), 2.0)
    assert arrivals.tokens == 8
    assert arrivals.itl.tolist() == [1.0, 1.0]


def test_requests_that_never_ran_together_have_no_gaps() -> None:
    arrivals = Arrivals(2)
    arrivals.take(frame(0), 1.0)
    arrivals.take(frame(0), 2.0)
    assert arrivals.itl.size == 0
