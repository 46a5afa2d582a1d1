"""Tokenizers in the `tokenizer.json` format: byte-level BPE, and metaspace vocabularies with byte fallback."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from wkvm_frontend.text.tokenizer import BadTokenizer

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_FILE_BYTES = 64 * 2**20
# Control tokens whose spelling the API must see in the output, even where a vocabulary calls them special.
_VISIBLE = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HfTokenizer:
    """The `tokenizers` library on one file. Text after the first segment gets no dummy prefix blank."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Raises BadTokenizer when the file cannot be used or has ids beyond the model's."""
        document = _read(path)
        self.table: Sequence[bytes] = _byte_table(document, vocab_size, path.name)
        self.specials: Mapping[int, str] = {
            int(added["id"]): str(added["content"])
            for added in document.get("added_tokens") or []
            if added.get("special") and added["content"] not in _VISIBLE
        }
        opening, inner = _bare(document, keep_prefix=True), _bare(document, keep_prefix=False)
        self._opening = {flag: _build(opening, path.name, specials=flag) for flag in (False, True)}
        self._inner = self._opening
        if opening != inner:
            self._inner = {flag: _build(inner, path.name, specials=flag) for flag in (False, True)}
        self.lead: tuple[int, ...] = _lead(document, self._opening[True], path.name)

    def encode(self, text: str, *, specials: bool, first: bool = False) -> array[int]:
        """Ids of the text, without those that a post-processor would add."""
        engine = (self._opening if first else self._inner)[specials]
        # The call for batches lets other threads run; the one for a single text keeps the interpreter's lock.
        ids = array("I", engine.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        if not specials and not self.specials.keys().isdisjoint(ids):
            return self._encode_broken(text, first)
        return ids

    def _encode_broken(self, text: str, first: bool) -> array[int]:
        # A vocabulary (unigram) may match a control token's spelling as plain text: no part spells it when it is cut.
        spellings = sorted(map(re.escape, self.specials.values()), key=len, reverse=True)
        ids = array("I")
        start = 0
        for match in re.finditer("|".join(spellings), text):
            cut = match.start() + 1
            ids.extend(self.encode(text[start:cut], specials=False, first=first and start == 0))
            start = cut
        if start == 0 or start == len(text):
            return array("I", [token for token in ids if token not in self.specials])
        ids.extend(self.encode(text[start:], specials=False))
        return ids


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_TOKENIZER_FILE_BYTES:
            raise BadTokenizer(f"{path.name} is larger than {MAX_TOKENIZER_FILE_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadTokenizer(f"{path.name} cannot be read: {type(error).__name__}") from None


def _bare(document: dict[str, Any], *, keep_prefix: bool) -> dict[str, Any]:
    """The document without truncation and padding and, for text inside a prompt, without a dummy prefix blank."""
    bare = document | {"truncation": None, "padding": None}
    if not keep_prefix:
        bare["normalizer"] = _without_prefix(document.get("normalizer"), "normalizers")
        bare["pre_tokenizer"] = _without_prefix(document.get("pre_tokenizer"), "pretokenizers")
    return bare


def _without_prefix(part: Any, list_key: str) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        kept = [_without_prefix(item, list_key) for item in part[list_key]]
        return part | {list_key: [item for item in kept if item is not None]}
    if kind == "Prepend":
        return None
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return part | {"add_prefix_space": False}
    if kind == "Metaspace":
        changed = {key: value for key, value in part.items() if key != "add_prefix_space"}
        return changed | {"prepend_scheme": "never"}
    return part


def _build(document: dict[str, Any], name: str, *, specials: bool) -> tokenizers.Tokenizer:
    try:
        engine = tokenizers.Tokenizer.from_str(msgspec.json.encode(document).decode())
    except Exception as error:  # the library raises bare Exception
        raise BadTokenizer(f"{name}: {str(error)[:200]}") from None
    engine.encode_special_tokens = not specials
    return engine


def _lead(document: dict[str, Any], plain: tokenizers.Tokenizer, name: str) -> tuple[int, ...]:
    if not document.get("post_processor"):
        return ()
    bare = plain.encode("a", add_special_tokens=False).ids
    dressed = plain.encode("a", add_special_tokens=True).ids
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return tuple(dressed[:start])
    raise BadTokenizer(f"{name}: its post-processor changes the text's own tokens")


def _byte_table(document: dict[str, Any], vocab_size: int, name: str) -> list[bytes]:
    to_bytes = _spelling(document, name)
    table = [b""] * vocab_size
    vocab = (document.get("model") or {}).get("vocab") or {}
    pieces = vocab.items() if isinstance(vocab, dict) else ((row[0], token) for token, row in enumerate(vocab))
    for piece, token in pieces:
        if not 0 <= token < vocab_size:
            raise BadTokenizer(f"{name}: token {piece!r} has id {token}; the model has {vocab_size}")
        table[token] = to_bytes(piece)
    for added in document.get("added_tokens") or []:
        token, content = int(added["id"]), str(added["content"])
        if not 0 <= token < vocab_size:
            raise BadTokenizer(f"{name}: token {content!r} has id {token}; the model has {vocab_size}")
        hidden = added.get("special") and content not in _VISIBLE
        table[token] = b"" if hidden else content.encode()
    return table


def _spelling(document: dict[str, Any], name: str) -> Callable[[str], bytes]:
    """How the vocabulary spells bytes, from its decoder."""
    kinds = _kinds(document.get("decoder"), "decoders")
    if "ByteLevel" in kinds or "ByteLevel" in _kinds(document.get("pre_tokenizer"), "pretokenizers"):
        alphabet = _byte_alphabet()
        # A piece outside the alphabet is an added token's text that also sits in the vocabulary.
        return lambda piece: (
            bytes([alphabet[char] for char in piece]) if all(char in alphabet for char in piece) else piece.encode()
        )
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _metaspace_bytes
    raise BadTokenizer(f"{name}: neither byte-level nor metaspace; decoder {sorted(kinds) or 'missing'}")


def _kinds(part: Any, list_key: str) -> set[str]:
    if not isinstance(part, dict):
        return set()
    if part.get("type") == "Sequence":
        return set().union(*(_kinds(item, list_key) for item in part[list_key]))
    return {str(part.get("type"))}


def _metaspace_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: printable Latin-1 for itself, the rest from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(rest)}
