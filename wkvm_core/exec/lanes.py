"""Lanes: the samplers of running requests, as tables on the device indexed by lane."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from wkvm_core.errors import Refused
from wkvm_core.kernels.draw import MAX_VOCAB_SIZE
from wkvm_core.kernels.lane import (
    ACTIVE,
    BIASED,
    COUNTED,
    DELAYED,
    DONE,
    FLOORED,
    FREQUENCY,
    HALTS,
    IN_PROMPT,
    KEY,
    LOGPROBS,
    MIN_P,
    MIN_TOKENS,
    NEEDS,
    NEXT,
    NUM_KNOBS,
    NUM_NUMBERS,
    POSITION,
    PRESENCE,
    RANKED,
    REMAINING,
    REPETITION,
    SAMPLED,
    SHARPNESS,
    STATUS,
    STOPS,
    TOP_K,
    TOP_P,
    TYPICAL,
    TYPICAL_P,
)
from wkvm_core.kernels.splitmix import stream_key
from wkvm_core.sched.plan import HALTED, STOPPED, LaneImage
from wkvm_proto.names import ErrorCode

COLDEST = 1e-30
"""Below it 1 / temperature leaves float32; the row is greedy."""


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """What is written to the tables when a lane is seated. Ids are int64 and distinct."""

    lane: int
    numbers: npt.NDArray[np.int64]
    """[NUM_NUMBERS]"""
    knobs: npt.NDArray[np.float64]
    """[NUM_KNOBS]"""
    stop_ids: npt.NDArray[np.int64]
    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    """As many as `bias_ids`."""
    counted_ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    """As many as `counted_ids`."""


class Lanes:
    """Samplers of up to `num_lanes` requests. Two more rows of each table stand for no lane: the last (index -1, as
    in a plan's NO_LANE) is always active, `idle` is always done and fits padded rows.

    Memory is touched only for what a lane uses: pages of the big tables are zero until written.
    """

    def __init__(self, num_lanes: int, vocab_size: int, device: torch.device, num_halt_sets: int) -> None:
        assert 1 <= vocab_size <= MAX_VOCAB_SIZE, f"vocabulary of {vocab_size}"
        self.num_lanes = num_lanes
        self.vocab_size = vocab_size
        self.device = device
        self.idle = num_lanes
        rows = num_lanes + 2
        self.numbers = torch.zeros(rows, NUM_NUMBERS, dtype=torch.int64, device=device)
        self.numbers[self.idle, STATUS] = DONE
        self.knobs = torch.zeros(rows, NUM_KNOBS, dtype=torch.float64, device=device)
        # uint8 [lanes + 2 + halt sets, vocab]: STOPPED at a lane's stop ids, HALTED at the ids of a halt set. Row
        # `idle` is empty. `numbers` holds offsets into it.
        self.marks = _blank((rows + num_halt_sets, vocab_size), torch.uint8, device)
        self._first_halt_set = rows
        self._num_halt_sets = num_halt_sets
        self.numbers[:, STOPS] = self.numbers[:, HALTS] = self.idle * vocab_size
        self._counts: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._needs = np.zeros(rows, np.uint8)
        self._top_k = np.zeros(rows, np.int64)
        self._num_logprobs = np.full(rows, -1, np.int64)
        self._marked: dict[int, npt.NDArray[np.int64]] = {}
        self._biased: dict[int, npt.NDArray[np.int64]] = {}
        self._counted: set[int] = set()

    @staticmethod
    def open(
        num_lanes: int, vocab_size: int, device: torch.device | str = "cpu", *, num_halt_sets: int | None = None
    ) -> Lanes:
        """Empty lanes; halt sets have indices below `num_halt_sets`, which is `num_lanes` unless told."""
        kind, where = Lanes, torch.device(device)
        if where.type != "cpu":
            from wkvm_core.exec.device_lanes import DeviceLanes

            kind = DeviceLanes
        return kind(num_lanes, vocab_size, where, num_lanes if num_halt_sets is None else num_halt_sets)

    # ---------------------------------------------------------------------------------------------- tables

    @property
    def counts(self) -> torch.Tensor:
        """int32 [lanes + 2, vocab]: IN_PROMPT, and times generated; kept for lanes with a penalty."""
        if self._counts is None:
            self._counts = _blank((self.num_lanes + 2, self.vocab_size), torch.int32, self.device)
        return self._counts

    @property
    def bias(self) -> torch.Tensor:
        """float32 [lanes + 2, vocab]."""
        if self._bias is None:
            self._bias = _blank((self.num_lanes + 2, self.vocab_size), torch.float32, self.device)
        return self._bias

    def needs(self, lanes: torch.Tensor) -> npt.NDArray[np.uint8]:
        """What each lane asks for beyond the plain greedy path, uint8 [rows] on the host."""
        return self._needs[_on_host(lanes)]

    def top_k(self, lanes: torch.Tensor) -> npt.NDArray[np.int64]:
        """top-k of each lane, 0 = off; int64 [rows] on the host."""
        return self._top_k[_on_host(lanes)]

    def num_logprobs(self, lanes: torch.Tensor) -> npt.NDArray[np.int64]:
        """Number of log-probabilities each lane asks for, -1 = none; int64 [rows] on the host."""
        return self._num_logprobs[_on_host(lanes)]

    # ---------------------------------------------------------------------------------------------- seating

    def set_halt_set(self, index: int, bitmap: bytes) -> None:
        """Keeps a halt set: bit t%8 of byte t//8 is set for each token t that halts. Raises ValueError when it is
        not one bitmap over the vocabulary or the index is out of range."""
        if not 0 <= index < self._num_halt_sets:
            raise ValueError(f"halt set {index}: there is room for {self._num_halt_sets}")
        if len(bitmap) != -(-self.vocab_size // 8):
            raise ValueError(f"halt set {index}: {len(bitmap)} bytes for {self.vocab_size} tokens")
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=self.vocab_size, bitorder="little")
        self._set_halt_marks(self._first_halt_set + index, bits * np.uint8(HALTED))

    def seat(self, lane: int, image: LaneImage) -> None:
        """Loads a lane: it goes on exactly where the image was taken, neither halted nor done.

        Raises Refused(TOKEN_OUT_OF_RANGE), nothing changed, when an id is not in the vocabulary; ValueError when the
        halt set's index is out of range.
        """
        assert 0 <= lane < self.num_lanes, f"lane {lane} of {self.num_lanes}"
        if not -1 <= image.halt_set < self._num_halt_sets:
            raise ValueError(f"halt set {image.halt_set}: there is room for {self._num_halt_sets}")
        sampling = image.sampling
        stop_ids = np.unique(self._ids(sampling.stop_ids, "stop_ids"))
        bias_ids = self._ids(sampling.bias_ids, "bias_ids")
        output = self._ids(image.output, "output")
        prompt = self._ids(image.prompt, "prompt")
        counted = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
        sampled = sampling.temperature >= COLDEST
        is_ranked = sampled and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.typical_p < 1.0)
        needs = (
            SAMPLED * sampled
            | RANKED * is_ranked
            | TYPICAL * (sampled and sampling.typical_p < 1.0)
            | FLOORED * (sampled and sampling.min_p > 0.0)
            | COUNTED * counted
            | BIASED * (bias_ids.size > 0)
            | DELAYED * (stop_ids.size > 0 and sampling.min_tokens > output.size)
            | LOGPROBS * (sampling.logprobs >= 0)
        )

        halts = self.idle if image.halt_set < 0 else self._first_halt_set + image.halt_set
        numbers = np.zeros(NUM_NUMBERS, np.int64)
        numbers[NEXT] = output[-1] if output.size else 0
        numbers[POSITION] = output.size
        numbers[REMAINING] = sampling.max_tokens - output.size
        numbers[STATUS] = ACTIVE
        numbers[STOPS] = (lane if stop_ids.size else self.idle) * self.vocab_size
        numbers[HALTS] = halts * self.vocab_size
        numbers[KEY] = stream_key(sampling.seed, image.sample)
        numbers[MIN_TOKENS] = sampling.min_tokens
        numbers[NEEDS] = needs
        numbers[TOP_K] = sampling.top_k
        knobs = np.zeros(NUM_KNOBS, np.float64)
        knobs[SHARPNESS] = 1.0 / sampling.temperature if sampled else 0.0
        knobs[TOP_P] = sampling.top_p
        knobs[TYPICAL_P] = sampling.typical_p
        knobs[MIN_P] = sampling.min_p
        knobs[PRESENCE] = sampling.presence_penalty
        knobs[FREQUENCY] = sampling.frequency_penalty
        knobs[REPETITION] = sampling.repetition_penalty
        counted_ids, counts = self._count(prompt, output, counted)
        biases = np.frombuffer(sampling.bias_values, "<f4").astype(np.float32)
        self._load(LaneRecord(lane, numbers, knobs, stop_ids, bias_ids, biases, counted_ids, counts))

        for owned, ids in ((self._marked, stop_ids), (self._biased, bias_ids)):
            owned.pop(lane, None)
            if ids.size:
                owned[lane] = ids
        self._counted.discard(lane)
        if counted:
            self._counted.add(lane)
        self._needs[lane] = needs
        self._top_k[lane] = sampling.top_k
        self._num_logprobs[lane] = sampling.logprobs

    def _ids(self, column: bytes, param: str) -> npt.NDArray[np.int64]:
        ids = np.frombuffer(column, "<u4").astype(np.int64)
        if ids.size and int(ids.max()) >= self.vocab_size:
            message = f"{param}: token {int(ids.max())} is not in the vocabulary of {self.vocab_size}"
            raise Refused(ErrorCode.TOKEN_OUT_OF_RANGE, message, param=param)
        return ids

    def _count(
        self, prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64], counted: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Distinct ids of prompt and output, and their counts; none for a lane that does not count."""
        if not counted:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        row = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        row[prompt] |= IN_PROMPT
        ids = np.flatnonzero(row != 0)  # several times as fast on bools
        return ids, row[ids]

    def _set_halt_marks(self, row: int, marks: npt.NDArray[np.uint8]) -> None:
        """marks: uint8 [vocab]."""
        self.marks[row] = torch.from_numpy(marks)

    def _load(self, record: LaneRecord) -> None:
        """Writes a lane's rows of all tables, after clearing what its last owner left there."""
        lane = record.lane
        self.numbers[lane] = torch.from_numpy(record.numbers)
        self.knobs[lane] = torch.from_numpy(record.knobs)
        if lane in self._marked:
            self.marks[lane, torch.from_numpy(self._marked[lane])] = 0
        if record.stop_ids.size:
            self.marks[lane, torch.from_numpy(record.stop_ids)] = STOPPED
        if lane in self._biased:
            self.bias[lane, torch.from_numpy(self._biased[lane])] = 0.0
        if record.bias_ids.size:
            self.bias[lane, torch.from_numpy(record.bias_ids)] = torch.from_numpy(record.biases)
        if lane in self._counted:
            self.counts[lane] = 0
        if record.counted_ids.size:
            self.counts[lane, torch.from_numpy(record.counted_ids)] = torch.from_numpy(record.counts)

    # ---------------------------------------------------------------------------------------------- running

    def active(self, lanes: torch.Tensor) -> torch.Tensor:
        """Which of int64 [rows] lanes are neither halted nor done: bool [rows]. No lane (-1) is active."""
        return self.numbers[:, STATUS][lanes] == ACTIVE

    def go(self, lanes: torch.Tensor) -> None:
        """Lifts the halt of int64 [rows] lanes; a done one stays done."""
        status = self.numbers[:, STATUS]
        status[lanes] = status[lanes] & DONE

    def next_tokens(self, lanes: torch.Tensor) -> torch.Tensor:
        """The token each lane sampled last, int64 [rows]; 0 where it has none."""
        return self.numbers[:, NEXT][lanes]


def _on_host(lanes: torch.Tensor) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = lanes.numpy(force=True)
    return numbers


@torch.inference_mode(mode=False)  # the tables are written in and out of that mode
def _blank(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU their pages cost nothing until they are written, which torch.zeros does not promise."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
