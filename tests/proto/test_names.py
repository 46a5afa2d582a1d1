from __future__ import annotations

import pytest

from wkvm_proto.names import BadHandle, StateHandle, check_name, parse_handle


def test_a_handle_is_written_name_at_version() -> None:
    assert str(StateHandle("chat.7", 3)) == "chat.7@3"
    assert parse_handle("chat.7@3") == ("chat.7", 3)
    assert parse_handle("chat.7") == ("chat.7", None)


@pytest.mark.parametrize(
    "name",
    ["", ".hidden", "-x", "_x", "a/b", "..", "a b", "a\0", "ä", "a" * 129, "a@b", "a\n", "%2e", "con\u202e"],
)
def test_a_text_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadHandle):
        check_name(name)


@pytest.mark.parametrize("text", ["a@", "a@0", "a@-1", "a@1.5", "a@x", "@1", "a@1@2", "a@01", "a@" + "9" * 30, "a@1\n"])
def test_a_text_that_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(BadHandle):
        parse_handle(text)


@pytest.mark.parametrize("name", ["a", "A9", "0", "a.b_c-d", "a" * 128])
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert check_name(name) == name
