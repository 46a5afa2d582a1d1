"""Ids to text as they come."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from wkvm_frontend.text.detokenizer import Detokenizer

TABLE = [bytes([value]) for value in range(256)] + [b"", "é".encode(), b"\xec\x95", b"\x88 x"]
IDS = st.lists(st.integers(0, len(TABLE) - 1), max_size=40)


@settings(max_examples=300, deadline=None)
@given(ids=IDS, tail=st.binary(max_size=4))
def test_joined_pieces_are_the_text_of_all_ids(ids: list[int], tail: bytes) -> None:
    detokenizer = Detokenizer(TABLE)
    pieces = [detokenizer.feed(token) for token in ids] + [detokenizer.finish(tail)]
    assert "".join(pieces) == (b"".join(TABLE[token] for token in ids) + tail).decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_text_split_into_bytes_never_shows_a_replacement_character(text: str) -> None:
    detokenizer = Detokenizer(TABLE)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.feed(byte)
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def test_a_character_over_several_tokens_comes_with_its_last() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.feed(258), detokenizer.feed(259)] == ["", "\uc548 x"]


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character() -> None:
    detokenizer = Detokenizer(TABLE)
    assert detokenizer.feed(258) == ""
    assert detokenizer.finish() == "\ufffd"
