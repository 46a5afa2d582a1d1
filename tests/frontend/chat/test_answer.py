"""Generated text taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wkvm_frontend.chat.answer import Answer, OuterBlanks, Phase, phase_after

BITS = st.lists(st.sampled_from(["<", "<think", ">", "</think>", "</", "think", " ", "\n", "a", "b c"]), max_size=12)


def read(pieces: list[str], phase: Phase) -> tuple[str, str]:
    answer = Answer(phase)
    shown = [piece for text in pieces for piece in answer.feed(text)] + answer.finish()
    assert all(piece.text for piece in shown)
    return (
        "".join(piece.text for piece in shown if piece.thought),
        "".join(piece.text for piece in shown if not piece.thought),
    )


@settings(max_examples=500, deadline=None)
@given(bits=BITS, phase=st.sampled_from(list(Phase)))
def test_how_the_text_is_cut_into_pieces_makes_no_difference(bits: list[str], phase: Phase) -> None:
    text = "".join(bits)
    whole = read([text] if text else [], phase)
    assert read([bit for bit in bits if bit], phase) == whole
    assert read(list(text), phase) == whole


@settings(max_examples=300, deadline=None)
@given(bits=BITS)
def test_an_answer_without_thoughts_is_the_stripped_text(bits: list[str]) -> None:
    text = "".join(bits)
    assert read(list(text), Phase.ANSWERING) == ("", text.strip())


@pytest.mark.parametrize(
    ("phase", "text", "thought", "answer"),
    [
        (Phase.UNDECIDED, "plain", "", "plain"),
        (Phase.UNDECIDED, "<think>t</think>a", "t", "a"),
        (Phase.UNDECIDED, "<thin", "", "<thin"),
        (Phase.UNDECIDED, "<think>t</thi", "t</thi", ""),
        (Phase.UNDECIDED, "a <think>t</think>", "", "a <think>t</think>"),
        (Phase.OPENING, ">t</think> a", "t", "a"),
        (Phase.OPENING, "\nt</think>a", "t", "a"),
        (Phase.THINKING, "t", "t", ""),
        (Phase.CLOSING, ">\na", "", "a"),
        (Phase.CLOSING, "a", "", "a"),
        (Phase.THINKING, "t</think></think>a", "t", "</think>a"),
    ],
)
def test_thoughts_end_where_their_tag_closes(phase: Phase, text: str, thought: str, answer: str) -> None:
    assert read(list(text), phase) == (thought, answer)


@pytest.mark.parametrize(
    ("end", "continued", "phase"),
    [
        ("Assistant:", False, Phase.UNDECIDED),
        ("Assistant: <think", False, Phase.OPENING),
        ("assistant\n<think>\n", False, Phase.THINKING),
        ("<think>\n</think", False, Phase.CLOSING),
        ("<think>\n\n</think>\n\n", False, Phase.ANSWERING),
        ("Assistant: so far", True, Phase.ANSWERING),
    ],
)
def test_the_prompts_end_says_how_the_answer_begins(end: str, continued: bool, phase: Phase) -> None:
    assert phase_after(end, continued=continued) is phase


def test_blanks_are_shown_only_between_text() -> None:
    blanks = OuterBlanks()
    assert [blanks.feed(piece) for piece in (" ", "\na ", "\n", "b", "  ")] == ["", "a", "", " \nb", ""]
