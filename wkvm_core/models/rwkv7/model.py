"""RWKV-7's forward pass over slots, on the CPU.

Formulas: RWKV-7 "Goose" (BlinkDL), as in the reference `rwkv` package; u, d and the six mixes are named as there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, Self, TypedDict, Unpack

import torch
from torch.nn import functional

from wkvm_core.kernels.linear import BFloat16Linear, pack_float32
from wkvm_core.kernels.wkv7 import cpu
from wkvm_core.models.protocol import Batch
from wkvm_core.models.rwkv7.names import HEAD_SIZE, Sizes
from wkvm_core.models.rwkv7.weights import Layer, Norm, Pack, Weights, pack_weights
from wkvm_core.state.layout import Fingerprint, StateFamily, StateLayout

_DECAY_SCALE: Final = -math.exp(-0.5)
_EPS: Final = 1e-5
_HEAD_EPS: Final = HEAD_SIZE * 1e-5
_PACKS: Final[Mapping[str, Pack]] = {"float32": pack_float32, "bfloat16": BFloat16Linear}


class Recurrence(Protocol):
    """The WKV-7 of one launch; see `wkvm_core.kernels.wkv7`."""

    def __call__(self, state: torch.Tensor) -> torch.Tensor: ...


Kernel = Callable[[torch.Tensor, Sequence[int], torch.Tensor, torch.Tensor], Recurrence]
"""Binds the recurrence to planes, offsets, read and write slots of a launch."""


class Options(TypedDict):
    """What a model is told besides its tensors."""

    fingerprint: str
    """The *model* part."""
    eos_ids: tuple[int, ...]
    compute_dtype: str
    """float32 or bfloat16"""
    device: torch.device


class Rwkv7:
    """A `Model`. Vectors, residual stream and all state are float32; matrix products are in the compute dtype."""

    family = "rwkv7"
    deterministic = False
    _kernel: Kernel = cpu.Wkv7

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], sizes: Sizes, **options: Unpack[Options]
    ) -> None:
        """tensors: canonical."""
        compute_dtype = options["compute_dtype"]
        self.name = name
        self.vocab_size = sizes.vocab
        self.eos_ids = options["eos_ids"]
        self.layout = state_layout(sizes)
        self.fingerprint = Fingerprint(options["fingerprint"], self.layout.fingerprint, compute_dtype)
        self.compute_dtype = compute_dtype
        self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
        self._sizes = sizes
        with torch.inference_mode():
            self._weights: Weights = pack_weights(tensors, sizes, _PACKS[compute_dtype], options["device"])

    def reserve(self, max_tokens: int, max_rows: int) -> None:
        """See `Model.reserve`; on the CPU there is nothing to reserve."""

    def twin(self) -> Self:
        """See `Model.twin`; on the CPU every forward pass has room of its own."""
        return self

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Model.forward`."""
        with torch.inference_mode():
            rows = Rows(batch.offsets, batch.read, batch.write, batch.single)
            x = self._run(batch.tokens, rows, families)
            return self._logits(x.index_select(0, batch.wanted))

    def _run(self, tokens: torch.Tensor, rows: Rows, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The residual stream `[tokens, C]` behind the last block; reads and writes the slots of the rows."""
        weights = self._weights
        mix = TimeMix(tokens.shape[0], self._sizes, weights.rank, rows, self._kernel)
        x = _layer_norm(weights.embedding.index_select(0, tokens).to(torch.float32), weights.ln0)
        states = families["wkv"].unbind(1)
        att_before = families["shift_att"].index_select(0, rows.read).unbind(1)
        ffn_before = families["shift_ffn"].index_select(0, rows.read).unbind(1)
        att_after, ffn_after = [], []
        for number, layer in enumerate(weights.layers):
            u = _layer_norm(x, layer.ln1)
            att_after.append(rows.last(u))
            x = layer.output(mix(layer, u, rows.previous(u, att_before[number]), states[number])).add_(x)
            u = _layer_norm(x, layer.ln2)
            ffn_after.append(rows.last(u))
            delta = rows.previous(u, ffn_before[number]).sub(u)
            hidden = layer.ffn_key(torch.addcmul(u, delta, layer.ffn_mix)).relu_()
            x = layer.ffn_value(hidden.mul_(hidden)).add_(x)
        families["shift_att"].index_copy_(0, rows.write, torch.stack(att_after, 1))
        families["shift_ffn"].index_copy_(0, rows.write, torch.stack(ffn_after, 1))
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._weights.head(_layer_norm(x, self._weights.ln_out))


class InvariantRwkv7(Rwkv7):
    """The arithmetic of a token depends neither on batch size nor on chunk borders, nor on being read or decoded.

    Every launch is cut, in order, into tiles of one fixed number of tokens, the last one padded, so each product and
    each elementwise operation has one shape for ever; the recurrence goes token by token. That a matrix product treats
    all rows of a tile alike is tried when the model is opened; where it does not, a tile is one token."""

    deterministic = True
    _kernel = cpu.SequentialWkv7

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], sizes: Sizes, **options: Unpack[Options]
    ) -> None:
        super().__init__(name, tensors, sizes, **options)
        wanted = tile_tokens(sizes)
        self.tile = wanted if self._treats_rows_alike(wanted) else 1
        """Tokens of a tile."""

    def _treats_rows_alike(self, rows: int) -> bool:
        """Two steps of equal rows give equal bits in every row of the tile."""
        families = {
            family.name: torch.zeros((rows + 1, family.layers, *family.shape)) for family in self.layout.families
        }
        slots = torch.arange(1, rows + 1)
        with torch.inference_mode():
            for read, token in ((torch.zeros_like(slots), self.vocab_size // 2), (slots, self.vocab_size // 3)):
                step = Rows(tuple(range(rows + 1)), read, slots, False)
                logits = self._logits(self._run(torch.full((rows,), token), step, families))
        results = [logits, *(view[1:] for view in families.values())]
        return all(torch.equal(result, result[:1].expand_as(result)) for result in results)

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Model.forward`."""
        with torch.inference_mode():
            size = self.tile
            wanted = batch.wanted.tolist()
            logits = torch.empty((len(wanted), self.vocab_size))
            for start, offsets, read, write in tiles(batch, size):
                end = start + offsets[-1]
                tokens = functional.pad(batch.tokens[start:end], (0, size - offsets[-1]))
                x = self._run(tokens, Rows(offsets, torch.tensor(read), torch.tensor(write), False), families)
                asked = [place for place, token in enumerate(wanted) if start <= token < end]
                if asked:
                    logits[asked] = self._logits(x)[[wanted[place] - start for place in asked]]
            return logits


def tiles(batch: Batch, size: int) -> Iterator[tuple[int, tuple[int, ...], list[int], list[int]]]:
    """The launch in runs of at most `size` tokens: first token, offsets inside the tile, slots read and written.

    A row that goes on from the tile before starts from the slot it wrote there."""
    reads, writes = batch.read.tolist(), batch.write.tolist()
    total = batch.offsets[-1]
    row = 0
    for start in range(0, total, size):
        end = min(start + size, total)
        offsets, read, write = [0], [], []
        while row < len(reads) and batch.offsets[row] < end:
            read.append(reads[row] if batch.offsets[row] >= start else writes[row])
            write.append(writes[row])
            offsets.append(min(batch.offsets[row + 1], end) - start)
            if batch.offsets[row + 1] > end:
                break
            row += 1
        yield start, tuple(offsets), read, write


class TimeMix:
    """The time mix of one launch, layer after layer over the same buffers, whose views are made once."""

    def __init__(self, tokens: int, sizes: Sizes, rank: int, rows: Rows, kernel: Kernel) -> None:
        heads, hidden = sizes.heads, sizes.hidden
        self._heads = heads
        self._flat = (tokens, hidden)
        self._mixed = torch.empty((6, tokens, hidden))
        self._low_inputs = self._mixed[2:]
        self._inputs = self._mixed[:3].unbind()
        self._inner = torch.empty((4, tokens, rank))
        _, self._inner_w, _, self._inner_g = self._inner.unbind()
        self._low = torch.empty((4, tokens, hidden))
        self._low_sigmoid = self._low[:3]
        self._v_gate, self._decay, self._rate, self._gate = self._low.unbind()
        planes = torch.empty((7, tokens, heads, HEAD_SIZE))
        self._r_heads, self._k_heads, self._v_heads, _, self._a_heads, _, _ = planes.unbind()
        self._r, self._k, self._v, self._w, self._a, self._b, _ = planes.view(7, tokens, hidden).unbind()
        self._recurrence = kernel(planes, rows.offsets, rows.read, rows.write)
        self._v_first: torch.Tensor | None = None

    def __call__(self, layer: Layer, u: torch.Tensor, previous: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The gated output `[tokens, C]` before the last matrix. The first call is that of block 0."""
        torch.addcmul(u, previous.sub(u), layer.mix, out=self._mixed)
        torch.bmm(self._low_inputs, layer.down, out=self._inner)
        self._inner_w.tanh_()
        self._inner_g.sigmoid_()
        torch.baddbmm(layer.base, self._inner, layer.up, out=self._low)
        self._low_sigmoid.sigmoid_()
        torch.mul(self._decay, _DECAY_SCALE, out=self._w).exp_()
        x_r, x_k, x_v = self._inputs
        self._r.copy_(layer.receptance(x_r))
        v = layer.value(x_v)
        if self._v_first is None:
            self._v_first = v
            self._v.copy_(v)
        else:
            torch.lerp(v, self._v_first, self._v_gate, out=self._v)
        key = layer.key(x_k)
        torch.mul(key, layer.k_k_negative, out=self._a)
        heads = self._a_heads
        heads.div_(torch.linalg.vector_norm(heads, dim=-1, keepdim=True).clamp_min_(1e-12))
        torch.mul(self._a, self._rate, out=self._b).neg_()
        torch.addcmul(layer.k_rest, self._rate, layer.k_a, out=self._k).mul_(key)
        y = self._recurrence(state)
        normed = torch.group_norm(
            y.view(self._flat), self._heads, layer.ln_x.weight, layer.ln_x.bias, _HEAD_EPS, cudnn_enabled=False
        )
        bonus = (self._r_heads * self._k_heads).mul_(layer.r_k).sum(-1, keepdim=True)
        return normed.view_as(y).addcmul_(bonus, self._v_heads).view(self._flat).mul_(self._gate)


class Rows:
    """Where the rows of a launch begin and end, for the token shift. Tokens after the last row belong to none."""

    def __init__(self, offsets: tuple[int, ...], read: torch.Tensor, write: torch.Tensor, single: bool) -> None:
        self.offsets, self.read, self.write = offsets, read, write
        self._first = None if single else torch.tensor(offsets[:-1])
        self._last = None if single else torch.tensor(offsets[1:]) - 1

    def previous(self, u: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """u `[tokens, C]` moved on by one token, each row's first one being `before` `[rows, C]`."""
        if self._first is None:
            return before
        moved = torch.empty_like(u)
        moved[1:] = u[:-1]
        return moved.index_copy_(0, self._first, before)

    def last(self, u: torch.Tensor) -> torch.Tensor:
        """[rows, C]: what each row's next token will see as its previous one."""
        return u if self._last is None else u.index_select(0, self._last)


def tile_tokens(sizes: Sizes) -> int:
    """Tokens of a tile of the invariant model: at most 16, and small enough that no elementwise operation on its six
    mixes is split among threads (torch splits above 32,768 numbers), where vector tails could round differently."""
    return max(1, min(16, 32768 // (6 * sizes.hidden)))


def state_layout(sizes: Sizes, dtype: str = "float32") -> StateLayout:
    """wkv [value, key] per head, and the last token's normed inputs of the time mix and the channel mix."""
    return StateLayout(
        (
            StateFamily(
                "wkv", (sizes.heads, HEAD_SIZE, HEAD_SIZE), dtype, sizes.layers, sharded_axis=0, is_matrix=True
            ),
            StateFamily("shift_att", (sizes.hidden,), dtype, sizes.layers),
            StateFamily("shift_ffn", (sizes.hidden,), dtype, sizes.layers),
        )
    )


def _layer_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return torch.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, _EPS, cudnn_enable=False)
