from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_core.exec.reading import MOST_CAPTURED, ROW_SIZES, SMALLEST, sizes


def least(chosen: Sequence[tuple[int, int]], tokens: int, rows: int) -> int:
    """Tokens of the launch that holds so many tokens and rows."""
    return next(size[0] for size in chosen if size[0] >= tokens and size[1] >= rows)


@given(max_tokens=st.integers(1, 10_000), max_rows=st.integers(1, 4096))
def test_sizes_ascend_and_none_is_beyond_what_a_launch_may_hold(max_tokens: int, max_rows: int) -> None:
    chosen = sizes(max_tokens, max_rows)
    assert list(chosen) == sorted(set(chosen))
    for tokens, rows in chosen:
        assert tokens <= min(max_tokens, MOST_CAPTURED)
        assert rows in ROW_SIZES
        assert rows <= max_rows
        assert rows < tokens  # rows of one token alone are no reading


@given(max_tokens=st.integers(2, 10_000), max_rows=st.integers(1, 4096))
def test_every_count_of_tokens_up_to_the_largest_captured_is_held_by_a_size(max_tokens: int, max_rows: int) -> None:
    assert max(tokens for tokens, _ in sizes(max_tokens, max_rows)) == min(max_tokens, MOST_CAPTURED)


@pytest.mark.parametrize("max_tokens", [SMALLEST + 1, 100, 1000, 2000, MOST_CAPTURED, 8192])
@pytest.mark.parametrize("rows", ROW_SIZES)
def test_beyond_the_smallest_at_most_a_fifth_is_padding(max_tokens: int, rows: int) -> None:
    chosen = sizes(max_tokens, 1024)
    for tokens in range(SMALLEST + 1, min(max_tokens, MOST_CAPTURED) + 1):
        held = least(chosen, tokens, rows)
        assert 5 * (held - tokens) <= held


@pytest.mark.parametrize("max_rows", [1, 7, 8, 63, 64, 65])
def test_row_counts_are_those_that_a_step_may_have(max_rows: int) -> None:
    assert {rows for _, rows in sizes(8192, max_rows)} == {rows for rows in ROW_SIZES if rows <= max_rows}


def test_steps_smaller_than_the_smallest_size_have_one_of_their_own() -> None:
    assert sizes(SMALLEST - 1, 8) == ((SMALLEST - 1, 1), (SMALLEST - 1, 8))
    assert sizes(5, 8) == ((5, 1),)
    assert sizes(1, 8) == ()


def test_long_steps_are_captured_up_to_where_the_host_keeps_up() -> None:
    assert sizes(8192, 1024) == sizes(MOST_CAPTURED, 1024)
