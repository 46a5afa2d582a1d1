from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import BadFrame, Vocabulary
from wkvm_proto.vocabulary import MAX_TOKEN_BYTES, vocabulary_digest, vocabulary_message, vocabulary_table


@given(st.lists(st.binary(max_size=12), max_size=50))
def test_a_table_comes_out_as_it_went_in(table: list[bytes]) -> None:
    assert vocabulary_table(vocabulary_message(table)) == table


def test_the_digest_tells_tables_apart_that_have_the_same_bytes() -> None:
    tables = [[b"ab", b"c"], [b"a", b"bc"], [b"abc", b""], [b"", b"abc"], [b"abc"]]
    assert len({vocabulary_digest(vocabulary_message(table)) for table in tables}) == len(tables)


@pytest.mark.parametrize(
    "message",
    [
        Vocabulary(b"abc", b""),
        Vocabulary(pack_u32([2, 1]), b"ab"),
        Vocabulary(pack_u32([3]), b"ab"),
        Vocabulary(pack_u32([1]), b"ab"),
        Vocabulary(pack_u32([MAX_TOKEN_BYTES + 1]), bytes(MAX_TOKEN_BYTES + 1)),
    ],
)
def test_columns_that_disagree_are_a_bad_frame(message: Vocabulary) -> None:
    with pytest.raises(BadFrame):
        vocabulary_table(message)
