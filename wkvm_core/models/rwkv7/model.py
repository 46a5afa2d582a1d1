"""RWKV-7's forward pass over slots, on the CPU.

Formulas: RWKV-7 "Goose" (BlinkDL), as in the reference `rwkv` package; u, d and the six mixes are named as there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch
from torch.nn import functional

from wkvm_core.kernels.linear import BFloat16Linear, Float32Linear
from wkvm_core.kernels.wkv7 import cpu
from wkvm_core.models.protocol import Batch
from wkvm_core.models.rwkv7.names import HEAD_SIZE, Sizes
from wkvm_core.models.rwkv7.weights import Layer, Norm, Pack, Weights, pack_weights
from wkvm_core.state.layout import Fingerprint, StateFamily, StateLayout

_DECAY_SCALE: Final = -math.exp(-0.5)
_EPS: Final = 1e-5
_HEAD_EPS: Final = HEAD_SIZE * 1e-5
_PACKS: Final[Mapping[str, Pack]] = {"float32": Float32Linear, "bfloat16": BFloat16Linear}


class Recurrence(Protocol):
    """The WKV-7 kernel of one launch; see `wkvm_core.kernels.wkv7`."""

    def __call__(self, planes: torch.Tensor, state: torch.Tensor) -> torch.Tensor: ...


class Rwkv7:
    """A `Model`. Vectors, residual stream and all state are float32; matrix products are in the compute dtype."""

    family = "rwkv7"
    deterministic = False
    _kernel: Callable[[Sequence[int], torch.Tensor, torch.Tensor], Recurrence] = cpu.Wkv7

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        sizes: Sizes,
        *,
        fingerprint: str,
        eos_ids: tuple[int, ...],
        compute_dtype: str,
        device: torch.device,
    ) -> None:
        """tensors: canonical; fingerprint: their *model* part. compute_dtype: float32 or bfloat16."""
        self.name = name
        self.vocab_size = sizes.vocab
        self.eos_ids = eos_ids
        self.layout = state_layout(sizes)
        self.fingerprint = Fingerprint(fingerprint, self.layout.fingerprint, compute_dtype)
        self.compute_dtype = compute_dtype
        self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
        self._sizes = sizes
        with torch.inference_mode():
            self._weights: Weights = pack_weights(tensors, sizes, _PACKS[compute_dtype], device)

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Model.forward`."""
        with torch.inference_mode():
            rows = Rows(batch.offsets, batch.read, batch.write, batch.single)
            x = self._run(batch.tokens, rows, self._kernel(batch.offsets, batch.read, batch.write), families)
            return self._logits(x if batch.wanted.shape[0] == x.shape[0] and batch.single else x[batch.wanted])

    def _run(
        self, tokens: torch.Tensor, rows: Rows, recurrence: Recurrence, families: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The residual stream `[tokens, C]` behind the last block; reads and writes the slots of the rows."""
        weights = self._weights
        x = _layer_norm(functional.embedding(tokens, weights.embedding).to(torch.float32), weights.ln0)
        wkv = families["wkv"]
        att_before = families["shift_att"].index_select(0, rows.read)
        ffn_before = families["shift_ffn"].index_select(0, rows.read)
        att_after, ffn_after = [], []
        v_first: torch.Tensor | None = None
        for number, layer in enumerate(weights.layers):
            u = _layer_norm(x, layer.ln1)
            att_after.append(rows.last(u))
            mixed, v_first = self._time_mix(
                layer, u, rows.previous(u, att_before[:, number]), v_first, recurrence, wkv[:, number]
            )
            x = layer.output.added(mixed, x)
            u = _layer_norm(x, layer.ln2)
            ffn_after.append(rows.last(u))
            delta = rows.previous(u, ffn_before[:, number]).sub(u)
            hidden = layer.ffn_key(torch.addcmul(u, delta, layer.ffn_mix)).relu_()
            x = layer.ffn_value.added(hidden.mul_(hidden), x)
        families["shift_att"].index_copy_(0, rows.write, torch.stack(att_after, 1))
        families["shift_ffn"].index_copy_(0, rows.write, torch.stack(ffn_after, 1))
        return x

    def _time_mix(
        self,
        layer: Layer,
        u: torch.Tensor,
        previous: torch.Tensor,
        v_first: torch.Tensor | None,
        recurrence: Recurrence,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gated output `[tokens, C]` of the time mix before its last matrix, and v of block 0."""
        tokens, hidden = u.shape
        mixed = torch.addcmul(u, previous.sub(u), layer.mix)
        planes = torch.empty((7, tokens, self._sizes.heads, HEAD_SIZE))
        flat = planes.view(7, tokens, hidden)
        _, k, v, w, a, b, _ = flat.unbind()
        layer.rkv.into(mixed[:3], flat[:3])
        low = layer.down(mixed[3:] if v_first is None else mixed[2:])
        low[-3].tanh_()
        low[-1].sigmoid_()
        low = layer.up.added(low, layer.base)
        low[:-1].sigmoid_()
        rate, gate = low[-2], low[-1]
        if v_first is None:
            v_first = v
        else:
            torch.lerp(v, v_first, low[0], out=v)
        torch.mul(low[-3], _DECAY_SCALE, out=w).exp_()
        heads = planes[4]
        torch.mul(k, layer.k_k, out=a)
        heads.div_(torch.linalg.vector_norm(heads, dim=-1, keepdim=True).clamp_min_(1e-12))
        torch.mul(a, rate, out=b)
        a.neg_()
        k.mul_(rate.mul_(layer.k_a).add_(layer.k_rest))
        y = recurrence(planes, state)
        normed = functional.group_norm(
            y.view(tokens, hidden), self._sizes.heads, layer.ln_x.weight, layer.ln_x.bias, _HEAD_EPS
        )
        bonus = (planes[0] * planes[1]).mul_(layer.r_k).sum(-1, keepdim=True)
        return normed.view_as(y).addcmul_(bonus, planes[2]).view(tokens, hidden).mul_(gate), v_first

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._weights.head(_layer_norm(x, self._weights.ln_out))


class InvariantRwkv7(Rwkv7):
    """The arithmetic of a token depends neither on batch size nor on chunk borders, nor on being read or decoded.

    Every launch is cut, in order, into tiles of one fixed number of tokens, the last one padded, so each product and
    each elementwise operation has one shape for ever; the recurrence goes token by token."""

    deterministic = True
    _kernel = cpu.SequentialWkv7

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Model.forward`."""
        with torch.inference_mode():
            size = tile_tokens(self._sizes)
            wanted = batch.wanted.tolist()
            logits = torch.empty((len(wanted), self.vocab_size))
            for start, offsets, read, write in tiles(batch, size):
                end = start + offsets[-1]
                tokens = functional.pad(batch.tokens[start:end], (0, size - offsets[-1]))
                rows = Rows(offsets, torch.tensor(read), torch.tensor(write), False)
                x = self._run(tokens, rows, self._kernel(offsets, rows.read, rows.write), families)
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


class Rows:
    """Where the rows of a launch begin and end, for the token shift. Tokens after the last row belong to none."""

    def __init__(self, offsets: tuple[int, ...], read: torch.Tensor, write: torch.Tensor, single: bool) -> None:
        self.read, self.write = read, write
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


def state_layout(sizes: Sizes) -> StateLayout:
    """wkv [value, key] per head, and the last token's normed inputs of the time mix and the channel mix."""
    return StateLayout(
        (
            StateFamily("wkv", (sizes.heads, HEAD_SIZE, HEAD_SIZE), "float32", sizes.layers, sharded_axis=0),
            StateFamily("shift_att", (sizes.hidden,), "float32", sizes.layers),
            StateFamily("shift_ffn", (sizes.hidden,), "float32", sizes.layers),
        )
    )


def _layer_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, _EPS)
