"""Bounds of the scheduler, final after start."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """All counts are of tokens unless the name says otherwise."""

    max_rows: int
    """Rows of a step, and lanes."""
    step_tokens: int
    """Budget of a step; at least `max_rows`, so that every decode row has its token."""
    chunk_tokens: int
    """Most tokens of one row in one step."""
    max_queued_requests: int
    max_queued_tokens: int
    """Estimated: prompts, and outputs as long as requests have been lately."""
    slice_tokens: int
    """A row that got so many while others wait may be parked for them; 0 = rows run to their end."""
    mixed_tokens: int = 1 << 62
    """Most tokens of the rows that read in a step that also decodes, so that decodes keep their pace while long prompts
    load. Never less than two a decoding row; first rows of one token come on top."""
