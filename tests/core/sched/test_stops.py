from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wkvm_core.sched.stops import StopAutomaton, StopCompiler, StopMatcher, VocabularyBytes

TEXT = st.binary(min_size=1, max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b))
TOKENS = st.lists(st.binary(max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b)), min_size=1, max_size=20)


@given(stops=st.lists(TEXT, min_size=1, max_size=5), tokens=TOKENS)
def test_the_first_stop_completed_is_found_and_tokens_before_it_are_clear(
    stops: list[bytes], tokens: list[bytes]
) -> None:
    vocabulary = VocabularyBytes(tokens)
    matcher = StopMatcher(StopAutomaton(stops), vocabulary)
    text = b""
    for index, token in enumerate(tokens):
        text += token
        match = matcher.push(index)
        ends = sorted((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text)
        if ends:
            assert match is not None
            end, length = ends[0]
            assert (match.start, len(match.text)) == (end + length, -length)
            kept = matcher.clear_tokens(match.start)
            before = b"".join(tokens[:kept])
            assert len(before) <= match.start
            assert text[: match.start] == before + matcher.tail(match, kept)
            return
        assert match is None
        held = max(k for k in range(len(text) + 1) if k == 0 or any(stop[:k] == text[-k:] for stop in stops))
        assert matcher.alive == (held > 0)
        clear = matcher.clear_tokens()
        assert len(b"".join(tokens[:clear])) <= len(text) - held
        assert clear == index + 1 or len(b"".join(tokens[: clear + 1])) > len(text) - held


@given(stops=st.lists(TEXT, min_size=1, max_size=4), table=TOKENS)
def test_the_halt_set_holds_the_tokens_that_complete_or_end_inside_a_stop(
    stops: list[bytes], table: list[bytes]
) -> None:
    compiled = StopCompiler(VocabularyBytes(table), len(table) + 3).compile(tuple(stops))
    for token, data in enumerate(table):
        ends_inside = any(data.endswith(stop[:k]) for stop in stops for k in range(1, len(stop)))
        halts = any(stop in data for stop in stops) or (ends_inside and bool(data))
        assert bool(compiled.halt_bitmap[token // 8] >> (token % 8) & 1) == halts
    assert len(compiled.halt_bitmap) == -(-(len(table) + 3) // 8)


def test_a_set_of_stops_is_compiled_once() -> None:
    compiler = StopCompiler(VocabularyBytes([b"a", b"b"]), 2, capacity=2)
    first = compiler.compile((b"a", b"b"))
    assert compiler.compile((b"b", b"a", b"a")) is first
    compiler.compile((b"x",))
    compiler.compile((b"y",))
    assert compiler.compile((b"a", b"b")) is not first


def test_bytes_that_are_no_whole_character_are_matched_as_bytes() -> None:
    data = "né😀".encode()
    vocabulary = VocabularyBytes([bytes([byte]) for byte in data])
    matcher = StopMatcher(StopAutomaton(["😀".encode()]), vocabulary)
    matches = [matcher.push(token) for token in range(len(data))]
    assert [match is not None for match in matches] == [False] * (len(data) - 1) + [True]
    assert matcher.clear_tokens(len("né".encode())) == 3
