"""Text stops: an automaton over bytes, the halt set it gives a vocabulary, and the place of a sample within it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec
import numpy as np


class Match(msgspec.Struct, frozen=True):
    """A stop string was completed."""

    start: int
    """Byte offset, from the matcher's first byte, at which the stop begins."""
    text: bytes


class StopAutomaton:
    """Aho-Corasick automaton over bytes of a set of stop strings: finds the first stop to be completed, and of those
    completed by the same byte the longest. (Aho and Corasick 1975.)"""

    def __init__(self, stops: Sequence[bytes]) -> None:
        assert stops, "no stop strings"
        assert all(stops), "an empty stop string"
        self.stops = tuple(stops)
        goto: list[dict[int, int]] = [{}]
        self.depth = [0]
        """Length of the longest suffix read that is a proper prefix of a stop, by automaton state."""
        found: list[bytes | None] = [None]
        for stop in stops:
            node = 0
            for byte in stop:
                if byte not in goto[node]:
                    goto.append({})
                    self.depth.append(self.depth[node] + 1)
                    found.append(None)
                    goto[node][byte] = len(goto) - 1
                node = goto[node][byte]
            found[node] = stop
        fail = [0] * len(goto)
        queue = deque(goto[0].values())
        while queue:
            node = queue.popleft()
            for byte, child in goto[node].items():
                back = fail[node]
                while back and byte not in goto[back]:
                    back = fail[back]
                fail[child] = goto[back].get(byte, 0) if goto[back].get(byte, 0) != child else 0
                if found[child] is None:
                    found[child] = found[fail[child]]
                queue.append(child)
        self._goto, self._fail, self._found = goto, fail, found

    def step(self, node: int, byte: int) -> int:
        """The state after one more byte."""
        while node and byte not in self._goto[node]:
            node = self._fail[node]
        return self._goto[node].get(byte, 0)

    def completed(self, node: int) -> bytes | None:
        """The longest stop that ends here."""
        return self._found[node]

    def halts(self, token: bytes) -> bool:
        """From a text that matches nothing yet, this token completes a stop or ends inside a possible one."""
        node = 0
        for byte in token:
            node = self.step(node, byte)
            if self._found[node] is not None:
                return True
        return node != 0


class VocabularyBytes:
    """The id -> bytes table, in a form in which tokens that hold a given byte are found fast."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self.table = list(table)
        self._data = np.frombuffer(b"".join(self.table), dtype=np.uint8)
        self._ends = np.cumsum([len(token) for token in self.table], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.table)

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes; b"" for specials and ids beyond the table."""
        return self.table[token] if token < len(self.table) else b""

    def tokens_with(self, byte: int) -> list[int]:
        """Ids of the tokens that contain a byte, ascending."""
        places = np.flatnonzero(self._data == byte)
        return [int(token) for token in np.unique(np.searchsorted(self._ends, places, side="right"))]


class CompiledStops(msgspec.Struct, frozen=True):
    """A set of stop strings for one vocabulary."""

    automaton: StopAutomaton
    halt_bitmap: bytes
    """Bit t%8 of byte t//8: token t halts a row from the state in which nothing matches. While a match is alive the
    row pauses after every token, so the tokens that only continue one need no bit."""


class StopCompiler:
    """Compiles each set of stop strings once; keeps the last `capacity` ones. Used by one thread."""

    def __init__(self, vocabulary: VocabularyBytes, vocab_size: int, capacity: int = 256) -> None:
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._capacity = capacity
        self._compiled: OrderedDict[tuple[bytes, ...], CompiledStops] = OrderedDict()

    def compile(self, stops: tuple[bytes, ...]) -> CompiledStops:
        """The automaton and halt set of these stop strings."""
        key = tuple(sorted(set(stops)))
        compiled = self._compiled.get(key)
        if compiled is None:
            automaton = StopAutomaton(key)
            bits = np.zeros(-(-self._vocab_size // 8) * 8, dtype=np.uint8)
            candidates = {token for stop in key for token in self.vocabulary.tokens_with(stop[0])}
            for token in candidates:
                if token < self._vocab_size and automaton.halts(self.vocabulary.table[token]):
                    bits[token] = 1
            compiled = CompiledStops(automaton, np.packbits(bits, bitorder="little").tobytes())
            self._compiled[key] = compiled
            if len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        return compiled


class StopMatcher:
    """One sample's place in the automaton, and which of its tokens may be delivered."""

    __slots__ = ("_automaton", "_ends", "_first", "_node", "_total", "_vocabulary")

    def __init__(self, automaton: StopAutomaton, vocabulary: VocabularyBytes, first: int = 0) -> None:
        """`first`: tokens of the output before the first one that is looked at (min_tokens)."""
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._node = 0
        self._total = 0
        self._ends: list[int] = []
        self._first = first

    @property
    def first(self) -> int:
        """Tokens at the start of the output that are not looked at."""
        return self._first

    @property
    def alive(self) -> bool:
        """The text ends inside a possible stop."""
        return self._node != 0

    def push(self, token: int) -> Match | None:
        """Reads a token; the match that it completes, if any. After a match the matcher is read no more."""
        automaton, node = self._automaton, self._node
        data = self._vocabulary.bytes_of(token)
        match = None
        for place, byte in enumerate(data):
            node = automaton.step(node, byte)
            stop = automaton.completed(node)
            if stop is not None:
                match = Match(self._total + place + 1 - len(stop), stop)
                break
        self._node = node
        self._total += len(data)
        self._ends.append(self._total)
        return match

    def clear_tokens(self, border: int | None = None) -> int:
        """Output tokens all of whose bytes lie before `border` (default: before the possible stop), from the start of
        the output. These are final whatever comes."""
        if border is None:
            border = self._total - self._automaton.depth[self._node]
        ends = self._ends
        count = len(ends)
        while count and ends[count - 1] > border:
            count -= 1
        return self._first + count

    def tail(self, match: Match, token: int) -> bytes:
        """Bytes before the stop of `token`, the first one that is not clear of it."""
        index = self.clear_tokens(match.start) - self._first
        start = self._ends[index - 1] if index else 0
        return self._vocabulary.bytes_of(token)[: max(match.start - start, 0)]
