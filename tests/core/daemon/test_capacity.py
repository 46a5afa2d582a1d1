from __future__ import annotations

from typing import Any

import pytest

from wkvm_core.daemon import capacity
from wkvm_core.daemon.config import CoreConfig
from wkvm_core.errors import Refused
from wkvm_core.sched.limits import Limits
from wkvm_core.state.slots import RESERVED_SLOTS
from wkvm_proto.names import ErrorCode

GIB = 2**30
MIB = 2**20


def on_cpu(**given: Any) -> Limits:
    return capacity.resolve_limits(CoreConfig(**given))


def on_gpu(*, gpu_bytes: int = 80 * GIB, lane_bytes: int = MIB, **given: Any) -> Limits:
    return capacity.resolve_limits(CoreConfig(**given), gpu_bytes=gpu_bytes, lane_bytes=lane_bytes)


def refused(error: pytest.ExceptionInfo[Refused]) -> tuple[ErrorCode, str | None]:
    return error.value.code, error.value.param


# ---------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("max_rows", "buckets"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (64, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
        (100, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)),
    ],
)
def test_buckets_are_chosen_from_max_rows(max_rows: int, buckets: tuple[int, ...]) -> None:
    assert capacity.resolve_buckets(CoreConfig(), max_rows) == buckets


@pytest.mark.parametrize("max_rows", [8, 64, 100, 1024, 4096])
def test_from_eight_rows_on_less_than_a_third_of_a_chosen_bucket_is_padding(max_rows: int) -> None:
    buckets = capacity.resolve_buckets(CoreConfig(), max_rows)
    for rows in range(8, max_rows + 1):
        bucket = next(size for size in buckets if size >= rows)
        assert 3 * (bucket - rows) < bucket


@pytest.mark.parametrize(
    ("given", "buckets"), [((8, 2, 8), (2, 8, 16)), ((16,), (16,)), ((1,), (1, 16)), ((3, 5), (3, 5, 16))]
)
def test_buckets_that_are_given_are_sorted_and_end_with_max_rows(
    given: tuple[int, ...], buckets: tuple[int, ...]
) -> None:
    assert capacity.resolve_buckets(CoreConfig(buckets=given), 16) == buckets


def test_a_bucket_above_max_rows_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refused, match="bucket 32 is more than max_rows 16") as error:
        capacity.resolve_buckets(CoreConfig(buckets=(4, 32, 20)), 16)
    assert refused(error) == (ErrorCode.BAD_CONFIG, "buckets")


# ---------------------------------------------------------------------------------------------- limits


def test_a_cpu_gets_small_steps_that_mix_freely() -> None:
    limits = on_cpu()
    assert (limits.max_rows, limits.step_tokens, limits.chunk_tokens, limits.mixed_tokens) == (64, 512, 256, 512)


def test_a_gpu_gets_large_steps_whole_prompts_and_a_bound_beside_decodes() -> None:
    limits = on_gpu()
    assert (limits.max_rows, limits.step_tokens, limits.chunk_tokens, limits.mixed_tokens) == (1024, 8192, 8192, 256)


def test_what_is_given_is_kept_on_either_device() -> None:
    given = {"max_rows": 7, "step_tokens": 700, "chunk_tokens": 70, "mixed_tokens": 33, "slice_tokens": 5}
    given |= {"max_queued_requests": 11, "max_queued_tokens": 13}
    for limits in (on_cpu(**given), on_gpu(**given)):
        assert limits == Limits(7, 700, 70, 11, 13, 5, 33)


def test_more_rows_than_the_usual_budget_raise_the_budget() -> None:
    assert on_cpu(max_rows=4096).step_tokens == 4096


def test_a_step_without_a_token_for_each_row_is_refused() -> None:
    for resolve in (on_cpu, on_gpu):
        with pytest.raises(Refused, match="step_tokens 7 is less than max_rows 8") as error:
            resolve(max_rows=8, step_tokens=7)
        assert refused(error) == (ErrorCode.BAD_CONFIG, "step_tokens")
        assert resolve(max_rows=8, step_tokens=8).step_tokens == 8


@pytest.mark.parametrize(
    ("gpu_bytes", "rows"), [(80 * GIB, 1024), (51_200 * MIB, 1024), (51_199 * MIB, 512), (16 * GIB, 256), (GIB, 64)]
)
def test_lanes_take_at_most_a_fiftieth_of_a_gpus_memory_unless_64_rows_need_more(gpu_bytes: int, rows: int) -> None:
    assert on_gpu(gpu_bytes=gpu_bytes).max_rows == rows


def test_rows_that_are_asked_for_are_not_cut_by_the_gpus_memory() -> None:
    assert on_gpu(gpu_bytes=GIB, max_rows=1000).max_rows == 1000


def test_steps_overlap_on_a_gpu_unless_told() -> None:
    assert [capacity.resolve_overlap(CoreConfig(), on_gpu=gpu) for gpu in (False, True)] == [0, 1]
    assert [capacity.resolve_overlap(CoreConfig(overlap=2), on_gpu=gpu) for gpu in (False, True)] == [2, 2]
    assert capacity.resolve_overlap(CoreConfig(overlap=0), on_gpu=True) == 0


def test_small_models_run_on_one_thread_unless_told() -> None:
    assert capacity.resolve_threads(CoreConfig(), 10_000_000, 8) == 1
    assert capacity.resolve_threads(CoreConfig(), 100_000_000, 8) == 8
    assert capacity.resolve_threads(CoreConfig(threads=3), 10_000_000, 8) == 3


# ---------------------------------------------------------------------------------------------- slots


def test_a_gpu_gets_as_many_slots_as_fit_beside_the_reserved_ones() -> None:
    assert capacity.resolve_slots(CoreConfig(), 4096, 100 * 4096 + 4095) == 100 - RESERVED_SLOTS


@pytest.mark.parametrize(("fitting", "slots"), [(1, 1), (2, 1), (9, 4), (512, 256), (10_000, 256)])
def test_a_cpu_takes_half_of_what_fits_up_to_256_and_never_none(fitting: int, slots: int) -> None:
    resolved = capacity.resolve(CoreConfig(), 4096, (fitting + RESERVED_SLOTS) * 4096, 0, 2)
    assert resolved.num_slots == slots


@pytest.mark.parametrize("most", [None, 256])
def test_slots_that_are_asked_for_are_given_up_to_the_last_that_fits(most: int | None) -> None:
    free = (50 + RESERVED_SLOTS) * 4096
    assert capacity.resolve_slots(CoreConfig(slots=50), 4096, free, most=most) == 50
    with pytest.raises(Refused, match="51 slots of 4096 bytes do not fit: there is room for 50") as error:
        capacity.resolve_slots(CoreConfig(slots=51), 4096, free, most=most)
    assert refused(error) == (ErrorCode.NOT_ENOUGH_MEMORY, "slots")


@pytest.mark.parametrize("free", [0, 4096, RESERVED_SLOTS * 4096 + 4095])
@pytest.mark.parametrize("most", [None, 256])
def test_memory_without_room_for_one_slot_is_refused(free: int, most: int | None) -> None:
    with pytest.raises(Refused, match="1 slots of 4096 bytes do not fit: there is room for 0") as error:
        capacity.resolve_slots(CoreConfig(), 4096, free, most=most)
    assert refused(error) == (ErrorCode.NOT_ENOUGH_MEMORY, "slots")


def test_host_blocks_fill_their_share_or_what_is_free() -> None:
    assert capacity.resolve_blocks(CoreConfig(host_memory_mb=1), 4096, GIB) == MIB // 4096
    assert capacity.resolve_blocks(CoreConfig(host_memory_mb=1), 4096, 10 * 4096 + 1) == 10
    assert capacity.resolve_blocks(CoreConfig(host_memory_mb=0), 4096, GIB) == 0


def test_slots_and_blocks_of_a_cpu_never_exceed_the_free_memory_together() -> None:
    resolved = capacity.resolve(CoreConfig(slots=90, host_memory_mb=1024), 4096, 100 * 4096, 0, 2)
    assert (resolved.num_slots, resolved.num_blocks, resolved.buckets) == (90, 100 - 90 - RESERVED_SLOTS, ())
