"""Text to ids and back, for every tokenizer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

from tests.frontend.models import card, demo_folder, metaspace_tokenizer, world_file, world_folder
from wkvm_frontend.text.byte_tokenizer import ByteTokenizer
from wkvm_frontend.text.huggingface import HfTokenizer
from wkvm_frontend.text.open import open_tokenizer
from wkvm_frontend.text.tokenizer import BadTokenizer, Tokenizer, decode, token_name
from wkvm_frontend.text.world import WORLD_FILE, WorldTokenizer

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@pytest.fixture(scope="module")
def world() -> WorldTokenizer:
    return WorldTokenizer(world_file(), 65_536)


@pytest.fixture(scope="module")
def demo() -> HfTokenizer:
    return HfTokenizer(demo_folder() / "tokenizer.json", 4096)


@pytest.fixture
def metaspace(tmp_path: Path) -> HfTokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(msgspec.json.encode(metaspace_tokenizer()))
    return HfTokenizer(path, 512)


@pytest.fixture(scope="module", params=["world", "demo", "bytes"])
def tokenizer(request: pytest.FixtureRequest, world: WorldTokenizer, demo: HfTokenizer) -> Tokenizer:
    of_name: dict[str, Tokenizer] = {"world": world, "demo": demo, "bytes": ByteTokenizer(256)}
    return of_name[request.param]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert decode(tokenizer.table, tokenizer.encode(text, specials=False)) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\n\n", [261]),
        ("\r\n\r\n", [19244]),
        (".\n\n", [47, 261]),
        ("😀", [3319, 153, 129]),
        ("안녕하세요", [18815, 3266, 150, 19052, 18777, 18862]),
        ("𠮷", [241, 161, 175, 184]),
        ("﷽", [240, 184, 190]),
        ("\0", [1]),
        ("URGENCY🌶️", [1522, 5947, 917, 3319, 141, 183, 19103]),
        (" " * 129, [65529, 33]),
    ],
)
def test_world_ids_are_the_published_ones(world: WorldTokenizer, text: str, ids: list[int]) -> None:
    assert world.encode(text, specials=False).tolist() == ids


def test_world_facts(world: WorldTokenizer) -> None:
    assert world.table[0] == b""
    assert set(world.table[65_530:]) == {b""}
    assert [world.table[byte + 1] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert token_name(world, 0) == "<|endoftext|>"
    assert token_name(world, 200) == "bytes:\\xc7"


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_world_ids_equal_the_reference_package(world: WorldTokenizer, reference: TRIE_TOKENIZER, text: str) -> None:
    assert world.encode(text, specials=False).tolist() == reference.encode(text)


@pytest.fixture(scope="module")
def reference() -> TRIE_TOKENIZER:
    return TRIE_TOKENIZER(str(world_file()))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x 'a' 1", "not `id literal length`"),
        ("7 __import__('os') 1", "not `id literal length`"),
        ("7 'ab' 1", "2 bytes"),
        ("70000 'a' 1", "70000"),
        ("7 '' 0", "0 bytes"),
        ("7 'a'", "not `id literal length`"),
    ],
)
def test_a_damaged_world_file_is_refused_by_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / WORLD_FILE
    path.write_text("1 '\\x00' 1\n" + line + "\n")
    with pytest.raises(BadTokenizer, match=r"line 2") as raised:
        WorldTokenizer(path, 65_536)
    assert said in str(raised.value)


def test_a_world_file_without_some_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / WORLD_FILE
    path.write_text("1 '\\x00' 1\n")
    with pytest.raises(BadTokenizer, match="no token for byte 1"):
        WorldTokenizer(path, 65_536)


def test_control_tokens_are_spelled_only_where_that_is_allowed(demo: HfTokenizer, metaspace: HfTokenizer) -> None:
    assert 0 in demo.encode("a<|endoftext|>b", specials=True)
    for tokenizer in (demo, metaspace):
        for spelling in tokenizer.specials.values():
            for text in (spelling, f"a{spelling}b", spelling * 3, f"{spelling} {spelling}"):
                ids = tokenizer.encode(text, specials=False)
                assert tokenizer.specials.keys().isdisjoint(ids)
                assert decode(tokenizer.table, ids).strip() == text.strip()
    assert 2 in metaspace.encode("</s>", specials=True)


def test_only_the_beginning_of_a_prompt_gets_a_dummy_blank(metaspace: HfTokenizer) -> None:
    first = metaspace.encode("hello", specials=False, first=True)
    inner = metaspace.encode("hello", specials=False)
    assert decode(metaspace.table, first) == " hello"
    assert decode(metaspace.table, inner) == "hello"
    assert metaspace.lead == (1,)


def test_bytes_of_a_metaspace_vocabulary_fall_back_to_bytes(metaspace: HfTokenizer) -> None:
    ids = metaspace.encode("é🌶", specials=False)
    assert decode(metaspace.table, ids) == "é🌶"
    assert all(len(metaspace.table[token]) == 1 for token in ids)


def test_tokens_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="the model has 100"):
        HfTokenizer(demo_folder() / "tokenizer.json", 100)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"model": {"type": "Magic"}, "decoder": {"type": "ByteLevel"}}']
)
def test_a_damaged_tokenizer_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BadTokenizer):
        HfTokenizer(path, 4096)


def test_the_folder_says_which_tokenizer_it_is(tmp_path: Path) -> None:
    assert isinstance(open_tokenizer(card()), ByteTokenizer)
    assert isinstance(open_tokenizer(card(demo_folder(), vocab_size=4096)), HfTokenizer)
    folder = world_folder(tmp_path / "w")
    assert isinstance(open_tokenizer(card(folder, vocab_size=65_536, family="rwkv7")), WorldTokenizer)


def test_a_folder_without_a_tokenizer_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=WORLD_FILE):
        open_tokenizer(card(tmp_path, vocab_size=65_536, family="rwkv7"))
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json"):
        open_tokenizer(card(tmp_path, vocab_size=1000, family="mamba2"))


def test_a_table_is_as_long_as_the_models_vocabulary(world: WorldTokenizer, demo: HfTokenizer) -> None:
    assert len(world.table) == 65_536
    assert len(demo.table) == 4096
    assert len(HfTokenizer(demo_folder() / "tokenizer.json", 5000).table) == 5000
    assert len(set(ByteTokenizer(300).table)) == 300
    with pytest.raises(BadTokenizer):
        ByteTokenizer(255)


def test_every_id_of_a_byte_level_vocabulary_has_a_text_and_text_stays_bytes() -> None:
    tokenizer = ByteTokenizer(65_536)
    assert all(tokenizer.table)
    assert (tokenizer.table[65], tokenizer.table[300], tokenizer.table[65_535]) == (b"A", b" 12c", b" ffff")
    assert list(tokenizer.encode(" 12c", specials=False)) == list(b" 12c")


def test_other_threads_run_while_a_long_text_is_encoded(demo: HfTokenizer) -> None:
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        demo.encode("a" * 1_000_000, specials=True)
        ended.set()

    worker = threading.Thread(target=encode)
    worker.start()
    begun.wait()
    turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        turns += not ended.is_set()
    worker.join()
    assert turns >= 5
