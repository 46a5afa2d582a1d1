"""RWKV-7's forward pass over slots, on the GPU.

Seven launches a block for rows of one token: residual, norm and mixes; the seven products of the time mix's inputs; the
four low-rank products behind them; the state with all that is done a head; the output product; residual, norm and mix;
the two products of the channel mix. Nothing is allocated and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Final, Self, TypedDict, Unpack

import torch

from wkvm_core.errors import Refused
from wkvm_core.kernels.mix import gpu as mix
from wkvm_core.kernels.project import gpu as project
from wkvm_core.kernels.project.gpu import Tile
from wkvm_core.kernels.project.groups import Act, Group
from wkvm_core.kernels.wkv7 import gpu as wkv7
from wkvm_core.models.protocol import Batch
from wkvm_core.models.rwkv7.gpu_tiles import FEW, Tiles, fused, tiles_for
from wkvm_core.models.rwkv7.gpu_weights import Layer, pack
from wkvm_core.models.rwkv7.model import state_layout
from wkvm_core.models.rwkv7.names import Sizes
from wkvm_core.state.layout import Fingerprint
from wkvm_proto.names import ErrorCode

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOW_PLANES: Final = (2, 3, 4, 5)
_LOW_ACTS: Final = (Act.NONE, Act.TANH, Act.NONE, Act.SIGMOID)
"""Of v, w, a, g."""


class Options(TypedDict):
    """What a model is told besides its tensors."""

    fingerprint: str
    """The *model* part."""
    eos_ids: tuple[int, ...]
    compute_dtype: str
    """float32, bfloat16 or float16"""
    state_dtype: str
    """The same; what is kept between tokens."""
    device: torch.device


class GpuRwkv7:
    """A `Model`. Sums, norms, the residual stream and the recurrence are float32, products of the compute dtype."""

    family = "rwkv7"
    deterministic = False

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], sizes: Sizes, **options: Unpack[Options]
    ) -> None:
        """tensors: canonical."""
        self.name = name
        self.vocab_size = sizes.vocab
        self.eos_ids = options["eos_ids"]
        self.layout = state_layout(sizes, options["state_dtype"])
        self.fingerprint = Fingerprint(options["fingerprint"], self.layout.fingerprint, options["compute_dtype"])
        self.compute_dtype = options["compute_dtype"]
        self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
        self._sizes = sizes
        self._fused = fused(sizes.hidden)
        self._device = options["device"]
        self._dtype = _DTYPES[self.compute_dtype]
        with torch.inference_mode():
            self._weights = pack(tensors, sizes, self._dtype, self._device)
            self._make_tables()
        self._plane_dtype = torch.float32 if self.deterministic else self._dtype
        self._wkv7 = _operations(_DTYPES[options["state_dtype"]], self._dtype, self._plane_dtype, self._device)
        self._few = _few(self._dtype, self._device) if self._dtype != torch.float32 and not self.deterministic else None
        self._views: tuple[object, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] | None = None

    def _make_tables(self) -> None:
        """Which plane each granule of outputs is made of, and its activation."""
        weights, hidden, device = self._weights, self._sizes.hidden, self._device
        low = tuple(Group(*group) for group in zip(weights.ranks, _LOW_PLANES, _LOW_ACTS, strict=True))
        v, w, a, _ = weights.ranks
        self._low_ends = (v, v + w, v + w + a)
        self._low_rows = sum(weights.ranks)
        self._into_table = project.table((Group(hidden, 0), Group(hidden, 1), Group(hidden, 2), *low), device)
        self._low_table = project.table(low, device)
        self._plain_table = project.table((Group(hidden),), device)
        self._key_table = project.table((Group(weights.ffn, 0, Act.RELU2),), device)
        self._head_table = project.table((Group(weights.head.shape[0]),), device)

    # ---------------------------------------------------------------------------------------------- memory

    def reserve(self, max_tokens: int, max_rows: int) -> None:
        """See `Model.reserve`."""
        hidden, dtype, device = self._sizes.hidden, self._dtype, self._device

        def numbers(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        with torch.inference_mode(mode=False):
            self._x = (
                numbers(max_tokens * hidden, dtype=torch.float32),
                numbers(max_tokens * hidden, dtype=torch.float32),
            )
            self._mixed = numbers(6 * max_tokens * hidden)
            self._projected = numbers(max_tokens * (3 * hidden + self._low_rows))
            self._low = numbers(4 * max_tokens * hidden)
            self._v_first = numbers(max_tokens * hidden)
            self._attended = numbers(max_tokens * hidden)
            self._product = numbers(max_tokens * hidden)
            some = [self._tiles(tokens) for tokens in (1, FEW, FEW + 1, self._fused)]
            split = max(max(tiles.output.split, tiles.ffn_value.split) for tiles in some)
            partial = max_tokens if self.deterministic else min(max_tokens, self._fused)
            self._partial = numbers(split * partial * hidden, dtype=torch.float32)
            self._hidden = numbers(max_tokens * self._weights.ffn)
            self._planes = numbers(5 * max_tokens * hidden, dtype=self._plane_dtype)
            self._decay = numbers(max_tokens * hidden, dtype=torch.float32)
            self._read_out = numbers(max_tokens * hidden, dtype=self._plane_dtype)
            self._counted = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
            self._last = (
                numbers(max_rows, hidden, dtype=torch.float32),
                numbers(max_rows, hidden, dtype=torch.float32),
            )
            self._final = numbers(max_rows, hidden)
            self._logits = numbers(max_rows, self._weights.head.shape[0], dtype=torch.float32)

    def twin(self) -> Self:
        """See `Model.twin`."""
        other = copy(self)
        other._views = None
        return other

    def _tiles(self, tokens: int) -> Tiles:
        few = self._few is not None
        return tiles_for(tokens, self._sizes.hidden, self._weights.ffn, has_few=few, one_for_all=self.deterministic)

    # ---------------------------------------------------------------------------------------------- running

    def forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Model.forward`. The logits are overwritten by the next forward pass."""
        with torch.inference_mode():
            return self._forward(batch, families)

    def _forward(self, batch: Batch, families: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tokens, hidden = batch.tokens.shape[0], self._sizes.hidden
        tiles = self._tiles(tokens)
        single = batch.single
        bounds, row_of = (None, None) if single else (batch.bounds, batch.row_of)
        assert single or (bounds is not None and row_of is not None), "a ragged batch without bounds"
        read, write = batch.read, batch.write
        x, x_next = (buffer[: tokens * hidden].view(tokens, hidden) for buffer in self._x)
        mixed = self._mixed[: 6 * tokens * hidden].view(6, tokens, hidden)
        low = self._low[: 4 * tokens * hidden].view(4, tokens, hidden)
        v_first, attended = (
            buffer[: tokens * hidden].view(tokens, hidden) for buffer in (self._v_first, self._attended)
        )
        hidden_units = self._hidden[: tokens * self._weights.ffn].view(1, tokens, self._weights.ffn)
        last_att, last_ffn = self._last
        if single:
            last_att = last_ffn = x  # not written
        mix.embed(batch.tokens, self._weights.embedding, self._weights.ln0.weight, self._weights.ln0.bias, x)
        parts: torch.Tensor | None = None
        for number, (layer, (wkv, shift_att, shift_ffn)) in enumerate(
            zip(self._weights.layers, self._by_layer(families), strict=True)
        ):
            mix.shift_mix(
                x, parts, layer.ln1.weight, layer.ln1.bias, layer.mixes, shift_att, read, write, x_next, mixed,
                bounds=bounds, row_of=row_of, last=last_att,
            )  # fmt: skip
            x, x_next = x_next, x
            rkv, inner = self._project_in(layer, mixed, tiles.into)
            project.up(inner, layer.up, self._low_ends, low, tiles.up)
            if single and not self.deterministic:
                self._wkv7.step(wkv, read, write, rkv, low, v_first, layer.vectors, attended, first=number == 0)
            else:
                self._scan(layer, wkv, batch, rkv, low, v_first, attended, first=number == 0)
            parts = self._product_of(attended[None], layer.output, tiles.output)
            mix.shift_mix(
                x, parts, layer.ln2.weight, layer.ln2.bias, layer.ffn_mix, shift_ffn, read, write, x_next, mixed[:1],
                bounds=bounds, row_of=row_of, last=last_ffn,
            )  # fmt: skip
            x, x_next = x_next, x
            if not single:
                assert bounds is not None
                mix.commit((last_att, last_ffn), (shift_att, shift_ffn), write, bounds)
            self._grouped(mixed[:1], layer.ffn_key, self._key_table, hidden_units, tiles.ffn_key)
            parts = self._product_of(hidden_units, layer.ffn_value, tiles.ffn_value)
        assert parts is not None
        return self._logits_of(x, parts, batch.wanted)

    def _by_layer(self, families: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The families' views of each layer, made once for a bank."""
        if self._views is None or self._views[0] is not families:
            names = ("wkv", "shift_att", "shift_ffn")
            self._views = (families, list(zip(*(families[name].unbind(1) for name in names), strict=True)))
        return self._views[1]

    def _project_in(self, layer: Layer, mixed: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """r, k, v `[3, T, C]` and the activated inner low-rank vectors `[T, R]`."""
        tokens, hidden = mixed.shape[1:]
        width = 3 * hidden + self._low_rows
        if tokens <= self._fused or self.deterministic:
            whole = self._projected[: tokens * width].view(1, tokens, width)
            self._grouped(mixed, layer.into, self._into_table, whole, tile)
            return whole[0, :, : 3 * hidden].view(tokens, 3, hidden).transpose(0, 1), whole[0, :, 3 * hidden :]
        rkv = self._projected[: 3 * tokens * hidden].view(3, tokens, hidden)
        inner = self._projected[3 * tokens * hidden : tokens * width].view(1, tokens, self._low_rows)
        weights = layer.into[: 3 * hidden].view(3, hidden, hidden)
        torch.bmm(mixed[:3], weights.transpose(1, 2), out=rkv)
        project.grouped(mixed, layer.into[3 * hidden :], self._low_table, inner, tile)
        return rkv, inner[0]

    def _grouped(
        self, x: torch.Tensor, weight: torch.Tensor, granules: torch.Tensor, out: torch.Tensor, tile: Tile
    ) -> None:
        few = self._few if tile.few else None
        if few is not None and few.warps(weight.shape[1], tile.split) is not None:
            few.grouped(x, weight, granules, out, split=tile.split)
        else:
            project.grouped(x, weight, granules, out, tile, ahead=tile.split > 1 and tile.rows == 16)

    def _product_of(self, x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
        """What `x [1, T, K]` adds to the residual stream, in parts `[S, T, C]`."""
        tokens, hidden = x.shape[1], weight.shape[0]
        if tokens <= self._fused or self.deterministic:
            size = tile.split * tokens * hidden
            parts = self._partial[:size].view(tile.split, tokens, hidden)
            self._grouped(x, weight, self._plain_table, parts, tile)
            return parts
        product = self._product[: tokens * hidden].view(1, tokens, hidden)
        torch.mm(x[0], weight.t(), out=product[0])
        return product

    def _scan(
        self,
        layer: Layer,
        wkv: torch.Tensor,
        batch: Batch,
        rkv: torch.Tensor,
        low: torch.Tensor,
        v_first: torch.Tensor,
        attended: torch.Tensor,
        *,
        first: bool,
    ) -> None:
        tokens, hidden = attended.shape
        planes = self._planes[: 5 * tokens * hidden].view(5, tokens, hidden)
        decay, read_out = (buffer[: tokens * hidden].view(tokens, hidden) for buffer in (self._decay, self._read_out))
        wkv7.prepare(rkv, low, v_first, layer.vectors, planes, decay, first=first)
        bounds = batch.bounds if batch.bounds is not None else self._counted[: tokens + 1]
        self._wkv7.scan(wkv, batch.read, batch.write, bounds, planes, decay, read_out)
        wkv7.finish(read_out, planes, low, layer.vectors, attended)

    def _logits_of(self, x: torch.Tensor, parts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        count = wanted.shape[0]
        logits = self._logits[:count]
        if not count:
            return logits[:, : self.vocab_size]
        final = self._final[:count]
        mix.final(x, parts, self._weights.ln_out.weight, self._weights.ln_out.bias, wanted, final)
        if count <= self._fused or self.deterministic or self._dtype == torch.float32:
            self._grouped(final[None], self._weights.head, self._head_table, logits[None], self._tiles(count).head)
        else:
            torch.mm(final, self._weights.head.t(), out_dtype=torch.float32, out=logits)
        return logits[:, : self.vocab_size]


class InvariantGpuRwkv7(GpuRwkv7):
    """The arithmetic of a token depends neither on batch size nor on chunk borders, nor on being read or decoded.

    Every product is cut in the same tiles whatever the number of tokens, its sums in one order; the recurrence goes
    token by token through the same kernels when it reads and when it decodes, from planes that are not rounded."""

    deterministic = True

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], sizes: Sizes, **options: Unpack[Options]
    ) -> None:
        """tensors: canonical. Refuses a 16-bit state: it is rounded wherever a chunk ends."""
        if options["state_dtype"] != "float32":
            message = f"deterministic mode keeps states in float32, not in {options['state_dtype']}"
            raise Refused(ErrorCode.BAD_CONFIG, message, param="state_dtype")
        super().__init__(name, tensors, sizes, **options)


def _operations(
    state_dtype: torch.dtype, dtype: torch.dtype, plane_dtype: torch.dtype, device: torch.device
) -> wkv7.Wkv7 | Any:
    """The fastest there are: CUDA C++ where its compiler is installed, else Triton."""
    if device.type != "cuda":
        return wkv7.Wkv7(state_dtype)
    try:
        from wkvm_core.kernels.wkv7.cuda import Wkv7
    except ImportError:
        return wkv7.Wkv7(state_dtype)
    return Wkv7(state_dtype, dtype, device, plane_dtype=plane_dtype)


def _few(dtype: torch.dtype, device: torch.device) -> Any:
    """Products of very few tokens in CUDA C++, or None where its compiler is not installed."""
    if device.type != "cuda":
        return None
    try:
        from wkvm_core.kernels.project.cuda import Few
    except ImportError:
        return None
    return Few(dtype, device)
