from __future__ import annotations

import random

import pytest
import torch

from tests.core.exec.sampling_rows import DEVICE, Pair, random_image
from wkvm_core.errors import Refused
from wkvm_core.exec.device_lanes import DeviceLanes
from wkvm_core.kernels.lane import DONE, FEED, GO, NEXT, NUM_ROW_COLUMNS, SAMPLE, STATUS, WAITING
from wkvm_core.sched.plan import NO_LANE, LaneImage
from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT
from wkvm_proto.columns import pack_u32
from wkvm_proto.sampling import Sampling


def entered(lanes: DeviceLanes, rows: list[list[int]]) -> list[list[int]]:
    """Token, read slot, write slot and lane of each row."""
    out = [torch.full((len(rows),), 77, device=DEVICE) for _ in range(4)]
    lanes.enter(torch.tensor(rows, device=DEVICE).view(-1, NUM_ROW_COLUMNS), *out)
    return torch.stack(out, 1).tolist()


def opened() -> DeviceLanes:
    """Lane 0 is active, 1 waits, 2 is done, and 1 besides; their next tokens are 10, 11, 12."""
    lanes = DeviceLanes(4, 20, DEVICE, 1)
    for lane, status in enumerate((0, WAITING, DONE, DONE + WAITING)):
        lanes.seat(lane, LaneImage(Sampling(max_tokens=9)))
        lanes.numbers[lane, STATUS], lanes.numbers[lane, NEXT] = status, 10 + lane
    return lanes


def test_active_rows_keep_their_slots_and_take_their_tokens() -> None:
    lanes = opened()
    assert entered(lanes, [[5, 6, 0, 3, FEED | SAMPLE], [7, 8, 0, 3, SAMPLE], [9, 9, NO_LANE, 4, 0]]) == [
        [10, 5, 6, 0],
        [3, 7, 8, 0],
        [4, 9, 9, 5],
    ]


def test_rows_of_halted_done_and_idle_lanes_become_padding() -> None:
    lanes = opened()
    padding = [0, ZERO_SLOT, SINK_SLOT, lanes.idle]
    rows = [[5, 6, 1, 3, FEED], [5, 7, 2, 3, FEED], [5, 8, 3, 3, 0], [0, 1, lanes.idle, 0, 0]]
    assert entered(lanes, rows) == [padding] * 4


def test_go_lifts_a_halt_and_nothing_else() -> None:
    lanes = opened()
    rows = [[5, 6, 1, 3, FEED | GO], [5, 7, 2, 3, FEED | GO], [5, 8, 3, 3, FEED | GO], [0, 1, lanes.idle, 0, GO]]
    padding = [0, ZERO_SLOT, SINK_SLOT, lanes.idle]
    assert entered(lanes, rows) == [[11, 5, 6, 1], padding, padding, padding]
    assert lanes.numbers[:4, STATUS].tolist() == [0, 0, DONE, DONE]


def test_more_rows_than_a_program_takes_enter_alike() -> None:
    lanes = opened()
    rows = [[slot, slot + 1, NO_LANE, slot % 20, 0] for slot in range(300)]
    assert entered(lanes, rows) == [[slot % 20, slot, slot + 1, 5] for slot in range(300)]


def test_seating_again_leaves_nothing_of_the_lane_before() -> None:
    rng = random.Random(3)
    pair = Pair([random_image(rng, 97) for _ in range(3)], 97, 64)
    for _ in range(12):
        pair.seat(rng.randrange(3), random_image(rng, 97))
        pair.assert_equal_tables()


def test_a_refused_request_changes_no_table() -> None:
    pair = Pair([random_image(random.Random(1), 97)], 97, 64)
    with pytest.raises(Refused):
        pair.device_lanes.seat(0, LaneImage(Sampling(max_tokens=9, stop_ids=pack_u32([97]))))
    pair.assert_equal_tables()
