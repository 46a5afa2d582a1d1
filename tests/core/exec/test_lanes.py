from __future__ import annotations

import pytest
import torch

from wkvm_core.errors import Refused
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.sampler import Sampler
from wkvm_core.sched.plan import EXHAUSTED, FAULT, HALTED, NO_LANE, RAN, STOPPED, LaneImage
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.names import ErrorCode
from wkvm_proto.sampling import Sampling

VOCAB = 24


def one_hot(*tokens: int) -> torch.Tensor:
    logits = torch.zeros(len(tokens), VOCAB)
    logits[torch.arange(len(tokens)), list(tokens)] = 5.0
    return logits


def halting_at(*tokens: int) -> bytes:
    bits = bytearray(-(-VOCAB // 8))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


class Only:
    """One lane in use, sampled token by token."""

    def __init__(self, image: LaneImage, lane: int = 2) -> None:
        self.lanes = Lanes.open(4, VOCAB)
        self.lane = torch.tensor([lane])
        self._sampler = Sampler(self.lanes)
        self.lanes.seat(lane, image)

    def sample(self, token: int, *, pause: bool = False) -> tuple[int, int]:
        return self.sample_from(one_hot(token), pause=pause)

    def sample_from(self, logits: torch.Tensor, *, pause: bool = False) -> tuple[int, int]:
        sampled = self._sampler.sample(logits, self.lane, torch.tensor([pause]))
        return int(sampled.tokens[0]), int(sampled.flags[0])

    @property
    def active(self) -> bool:
        return bool(self.lanes.active(self.lane)[0])


def greedy(**fields: object) -> LaneImage:
    halt_set = fields.pop("halt_set", -1)
    return LaneImage(Sampling(**{"max_tokens": 100, "temperature": 0.0} | fields), halt_set=halt_set)  # type: ignore[arg-type]


def test_a_sampled_token_is_the_lanes_next_token() -> None:
    only = Only(greedy())
    assert only.sample(7) == (7, RAN)
    assert only.lanes.next_tokens(only.lane).tolist() == [7]
    assert only.active


def test_a_stop_id_ends_the_lane_and_nothing_moves_it_again() -> None:
    only = Only(greedy(stop_ids=pack_u32([3, VOCAB - 1])))
    assert only.sample(VOCAB - 2) == (VOCAB - 2, RAN)
    assert only.sample(VOCAB - 1) == (VOCAB - 1, RAN | STOPPED)
    assert not only.active
    assert only.sample(5) == (-1, 0)
    only.lanes.go(only.lane)
    assert not only.active
    assert only.lanes.next_tokens(only.lane).tolist() == [VOCAB - 1]


def test_the_last_token_allowed_ends_the_lane() -> None:
    only = Only(greedy(max_tokens=2))
    assert only.sample(4) == (4, RAN)
    assert only.sample(4) == (4, RAN | EXHAUSTED)
    assert only.sample(4) == (-1, 0)


def test_a_token_of_the_halt_set_halts_until_go() -> None:
    only = Only(greedy())
    only.lanes.set_halt_set(1, halting_at(0, 9, VOCAB - 1))
    only.lanes.seat(2, greedy(halt_set=1))
    assert only.sample(8) == (8, RAN)
    for token in (0, 9, VOCAB - 1):
        assert only.sample(token) == (token, RAN | HALTED)
        assert only.sample(8) == (-1, 0)
        only.lanes.go(only.lane)
        assert only.active


def test_a_replaced_halt_set_halts_at_its_own_tokens_only() -> None:
    only = Only(greedy())
    only.lanes.set_halt_set(0, halting_at(1))
    only.lanes.set_halt_set(0, halting_at(2))
    only.lanes.seat(2, greedy(halt_set=0))
    assert only.sample(1) == (1, RAN)
    assert only.sample(2) == (2, RAN | HALTED)


def test_pause_halts_whatever_is_sampled() -> None:
    only = Only(greedy())
    assert only.sample(5, pause=True) == (5, RAN | HALTED)
    assert only.sample(6, pause=True) == (-1, 0)
    only.lanes.go(only.lane)
    assert only.sample(6) == (6, RAN)


def test_a_stop_on_the_last_token_in_the_halt_set_tells_all_three() -> None:
    only = Only(greedy())
    only.lanes.set_halt_set(0, halting_at(3))
    only.lanes.seat(2, greedy(max_tokens=1, stop_ids=pack_u32([3]), halt_set=0))
    assert only.sample(3, pause=True) == (3, RAN | STOPPED | EXHAUSTED | HALTED)
    only.lanes.go(only.lane)
    assert not only.active


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 11, VOCAB - 1])
def test_logits_that_are_not_finite_end_the_lane_unsampled(poison: float, place: int) -> None:
    only = Only(greedy())
    only.sample(6)
    logits = one_hot(5)
    logits[0, place] = poison
    assert only.sample_from(logits) == (-1, FAULT)
    assert not only.active
    assert only.lanes.next_tokens(only.lane).tolist() == [6]


def test_logits_of_minus_infinity_alone_are_a_fault_and_some_of_them_are_not() -> None:
    only = Only(greedy())
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 13] = -3.0
    assert only.sample_from(logits) == (13, RAN)
    assert only.sample_from(torch.full((1, VOCAB), -torch.inf)) == (-1, FAULT)


def test_seating_again_forgets_everything_of_the_lane_before() -> None:
    everything = greedy(
        max_tokens=1,
        stop_ids=pack_u32([3]),
        bias_ids=pack_u32([4]),
        bias_values=pack_f32([-100.0]),
        presence_penalty=2.0,
        repetition_penalty=50.0,
    )
    only = Only(everything)
    only.sample(3)
    only.lanes.seat(2, greedy())
    for token in (3, 4, 3, 3):
        assert only.sample(token) == (token, RAN)


def test_no_lane_is_active_and_the_idle_lane_is_not() -> None:
    lanes = Lanes.open(3, VOCAB)
    assert lanes.active(torch.tensor([NO_LANE, lanes.idle])).tolist() == [True, False]
    lanes.go(torch.tensor([NO_LANE, lanes.idle]))
    assert lanes.active(torch.tensor([NO_LANE, lanes.idle])).tolist() == [True, False]


def test_padded_rows_of_the_idle_lane_do_nothing() -> None:
    lanes = Lanes.open(3, VOCAB)
    lanes.seat(0, greedy())
    rows = torch.tensor([0, lanes.idle, lanes.idle])
    sampled = Sampler(lanes).sample(one_hot(1, 2, 3), rows, torch.zeros(3, dtype=torch.bool))
    assert sampled.tokens.tolist() == [1, -1, -1]
    assert sampled.flags.tolist() == [RAN, 0, 0]


@pytest.mark.parametrize("field", ["stop_ids", "bias_ids"])
def test_an_id_outside_the_vocabulary_is_refused_and_the_lane_unchanged(field: str) -> None:
    only = Only(greedy())
    only.sample(7)
    bad = greedy(**{field: pack_u32([1, VOCAB])}, bias_values=pack_f32([0.0, 0.0]) if field == "bias_ids" else b"")
    with pytest.raises(Refused) as refusal:
        only.lanes.seat(2, bad)
    assert refusal.value.code is ErrorCode.TOKEN_OUT_OF_RANGE
    assert refusal.value.param == field
    assert only.lanes.next_tokens(only.lane).tolist() == [7]
    assert only.sample(1) == (1, RAN)


def test_a_halt_set_that_is_not_a_bitmap_over_the_vocabulary_is_refused() -> None:
    lanes = Lanes.open(3, VOCAB, num_halt_sets=2)
    with pytest.raises(ValueError, match="bytes for 24 tokens"):
        lanes.set_halt_set(0, b"\0")
    with pytest.raises(ValueError, match="room for 2"):
        lanes.set_halt_set(2, halting_at(1))
    with pytest.raises(ValueError, match="room for 2"):
        lanes.seat(0, greedy(halt_set=2))


def test_tables_of_many_lanes_cost_no_memory_until_used() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    lanes = Lanes.open(1024, 65_536)
    for lane in range(64):
        lanes.seat(lane, greedy(stop_ids=pack_u32([0])))
    lanes.seat(64, greedy(presence_penalty=1.0, bias_ids=pack_u32([65_535]), bias_values=pack_f32([1.0])))
    assert lanes.counts.numel() + lanes.bias.numel() > 2 * 1024 * 65_536
    assert resident_bytes() - before < 32 * 2**20
