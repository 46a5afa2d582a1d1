"""Which ids of a row a draw keeps, and the draw, in one program.

The rank of an id is an integer: the bits of its logit's scaled distance below the best one, which grow as the logit
falls. What a limit keeps is a `cut` and a `last` id: the ranks below the cut, and of those at the cut the ids up to the
last. A limit (top-k: so many ids; top-p: so much weight) is the smallest rank at which the sum over all that stand no
deeper reaches it: one pass over the row cuts the range of ranks into four, the ranks of the right part are copied out,
passes over the copy cut on by four, and what fits a tile is halved. Sums are integers, so neither blocks nor threads
leave a trace in the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wkvm_core.kernels import splitmix
from wkvm_core.kernels.sample.row.gpu import tile_of


def _bits(depth: float) -> int:
    return int(torch.tensor(depth, dtype=torch.float32).view(torch.int32))


_ONE = tl.constexpr(2.0**40)
_DEEPEST = tl.constexpr(_bits(29.0))
"""exp(-29) * 2**40 < 1: what stands deeper has no weight."""
# The first borders: less deep than 2 stand few ids; a flat row's limit is often between 4.5 and 7.5.
_RANK_1 = tl.constexpr(_bits(2.0))
_RANK_2 = tl.constexpr(_bits(4.5))
_RANK_3 = tl.constexpr(_bits(7.5))
_REACH = tl.constexpr(0.1875)
"""How far from where a lane's limit was last it is looked for first."""
_NO_RANK = tl.constexpr(_bits(float("inf")))
"""Of what is not kept: deeper than any cut, and of weight 0."""
_GAMMA = tl.constexpr(splitmix.signed(splitmix.GAMMA))
_FIRST = tl.constexpr(splitmix.signed(splitmix.FIRST))
_SECOND = tl.constexpr(splitmix.signed(splitmix.SECOND))
_MASK_30 = tl.constexpr((1 << 34) - 1)
_MASK_27 = tl.constexpr((1 << 37) - 1)
_MASK_31 = tl.constexpr((1 << 33) - 1)
_MASK_12 = tl.constexpr((1 << 52) - 1)
_HALF = tl.constexpr(0.5)
_ULP = tl.constexpr(2.0**-52)


@triton.jit
def _rank(x, top, sharpness):
    """int32: 0 for the best."""
    return (tl.abs(top - x) * sharpness).to(tl.int32, bitcast=True)


@triton.jit
def _share(rank):
    """float32 exp(x) of the scaled distance x from the best."""
    return tl.exp(-rank.to(tl.float32, bitcast=True))


@triton.jit
def _weight(rank):
    """int64, in 2**-40 of the best one's."""
    return (_share(rank) * _ONE).to(tl.int64)


@triton.jit
def _logits(source, ids, VOCAB: tl.constexpr):
    return tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))


@triton.jit
def _ranks(x, ids, top, sharpness, cut, last):
    """Ranks of ids with logits x; _NO_RANK for those that are not kept."""
    rank = _rank(x, top, sharpness)
    return tl.where((rank < cut) | ((rank == cut) & (ids <= last)), rank, _NO_RANK)


@triton.jit
def whole(VOCAB: tl.constexpr):
    """The cut that keeps all that has a weight."""
    return tl.full((), _DEEPEST, tl.int32), tl.full((), VOCAB - 1, tl.int32)


@triton.jit
def _measure(rank, COUNTS: tl.constexpr):
    """What a rank adds to a sum: 1, int32, or its weight, int64; nothing when it is not kept."""
    if COUNTS:
        return (rank != _NO_RANK).to(tl.int32)
    else:
        return _weight(rank)


@triton.jit
def _up_to(sums, rank, measure, border):
    """sums `[BLOCK / 4]`, plus what stands no deeper than the border."""
    return sums + tl.sum(tl.where(rank <= border, measure, tl.zeros_like(measure)), 1)


@triton.jit
def _halve(sums, border, limit, low, below, high, upto):
    """The range of ranks (low, high] around the limit, narrower by one border; `below` and `upto` are the sums at its
    ends."""
    is_reached = sums >= limit
    low = tl.where(is_reached, low, border)
    below = tl.where(is_reached, below, sums)
    high = tl.where(is_reached, border, high)
    upto = tl.where(is_reached, sums, upto)
    return is_reached, low, below, high, upto


@triton.jit
def _add_up(rank, s1, s2, s3, t1, t2, t3, COUNTS: tl.constexpr):
    """The sums up to each border with those of a tile, and a tile's whole sum."""
    measure = _measure(rank, COUNTS)
    s1 = _up_to(s1, rank, measure, t1)
    s2 = _up_to(s2, rank, measure, t2)
    s3 = _up_to(s3, rank, measure, t3)
    return s1, s2, s3, tl.sum(measure, 1)


@triton.jit
def _narrow(s1, s2, s3, t1, t2, t3, limit, low, below, high, upto):
    """The part of (low, high] between neighbouring borders t1 <= t2 <= t3 that holds the limit. The sums go without
    what stands no deeper than low."""
    base = below
    is_upper, low, below, high, upto = _halve(base + tl.sum(s2, 0), t2, limit, low, below, high, upto)
    s1, t1 = tl.where(is_upper, s1, s3), tl.where(is_upper, t1, t3)
    _, low, below, high, upto = _halve(base + tl.sum(s1, 0), t1, limit, low, below, high, upto)
    return low, below, high, upto


@triton.jit
def _border(depth, cut):
    """The rank at a depth, 0 for one that is no number or above the best, at most the cut."""
    return tl.minimum(tl.where(depth >= 0.0, depth, 0.0).to(tl.int32, bitcast=True), cut)


@triton.jit
def _narrow_row(
    source,
    top,
    sharpness,
    cut,
    last,
    share,
    limit,
    edge,
    COUNTS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first pass, over the whole row: the limit, by weight `share` of the sum, and the range it lies in. `edge`,
    float32, is where the limit was last; 0 if that is not known."""
    tile = tile_of(BLOCK)
    t1, t2, t3 = tl.minimum(cut, _RANK_1), tl.minimum(cut, _RANK_2), tl.minimum(cut, _RANK_3)
    if edge != 0.0:
        near = top * sharpness - edge
        t1 = _border(near - _REACH, cut)
        t2 = tl.maximum(_border(near + _REACH, cut), t1)
        t3 = tl.maximum(t3, t2)
    s0 = tl.zeros([BLOCK // 4], tl.int32 if COUNTS else tl.int64)
    s1, s2, s3 = s0, s0, s0
    for start in tl.range(0, VOCAB, BLOCK):
        rank = _ranks(_logits(source, start + tile, VOCAB), start + tile, top, sharpness, cut, last)
        s1, s2, s3, own = _add_up(rank, s1, s2, s3, t1, t2, t3, COUNTS)
        s0 += own
    upto = tl.sum(s0, 0).to(tl.int64)
    if not COUNTS:
        wanted = share * upto.to(tl.float64)
        limit = wanted.to(tl.int64)
        limit = tl.maximum(tl.where(limit.to(tl.float64) < wanted, limit + 1, limit), 1)
    low = tl.full((), -1, tl.int32)
    below = tl.zeros((), tl.int64)
    low, below, high, upto = _narrow(s1, s2, s3, t1, t2, t3, limit, low, below, cut, upto)
    return limit, low, below, high, upto


@triton.jit
def _narrow_copy(space, length, limit, low, below, high, upto, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """A pass over copied ranks: the quarter of (low, high] that holds the limit."""
    tile = tile_of(BLOCK)
    step = tl.maximum((high - low) // 4, 1)
    t1, t2, t3 = low + step, tl.minimum(low + step * 2, high), tl.minimum(low + step * 3, high)
    s1 = tl.zeros([BLOCK // 4], tl.int32 if COUNTS else tl.int64)
    s2, s3 = s1, s1
    start = tl.zeros((), tl.int32)
    while start < length:
        rank = tl.load(space + start + tile, mask=start + tile < length, other=_NO_RANK)
        s1, s2, s3, _ = _add_up(rank, s1, s2, s3, t1, t2, t3, COUNTS)
        start += BLOCK
    return _narrow(s1, s2, s3, t1, t2, t3, limit, low, below, high, upto)


@triton.jit
def _append(rank, target, found, low, high):
    """Ranks of a tile in (low, high], in their order, behind the `found` ones of the target: how many there are then.

    The places come from an exchange between all threads, so the whole tile is read before any of it is overwritten.
    """
    is_in = (rank > low) & (rank <= high)
    ones = is_in.to(tl.int32)
    of_four = tl.sum(ones, 1)
    own = tl.sum(of_four, 0)
    if own > 0:
        places = found + (tl.cumsum(of_four, 0) - of_four)[:, None] + tl.cumsum(ones, 1) - ones
        tl.store(target + places, rank, mask=is_in)
    return found + own


@triton.jit
def _copy_of_row(source, space, top, sharpness, cut, last, low, high, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Ranks of a row in (low, high]: how many are in `space`."""
    tile = tile_of(BLOCK)
    found = tl.zeros((), tl.int32)
    x = _logits(source, tile, VOCAB)
    for start in tl.range(0, VOCAB, BLOCK):
        following = _logits(source, start + BLOCK + tile, VOCAB)  # on its way while all threads wait for each other
        found = _append(_ranks(x, start + tile, top, sharpness, cut, last), space, found, low, high)
        x = following
    tl.debug_barrier()
    return found


@triton.jit
def _copy_of_copy(space, length, low, high, BLOCK: tl.constexpr):
    """Copied ranks in (low, high], in place: how many are left."""
    tile = tile_of(BLOCK)
    found = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    while start < length:
        rank = tl.load(space + start + tile, mask=start + tile < length, other=_NO_RANK)
        found = _append(rank, space, found, low, high)
        start += BLOCK
    tl.debug_barrier()
    return found


@triton.jit
def _last_tie(source, top, sharpness, cut, last, tie, wanted, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The `wanted`-th of the kept ids of rank `tie`."""
    tile = tile_of(BLOCK)
    seen = tl.zeros((), tl.int64)
    place = last
    for start in tl.range(0, VOCAB, BLOCK):
        ids = start + tile
        ones = (_ranks(_logits(source, ids, VOCAB), ids, top, sharpness, cut, last) == tie).to(tl.int32)
        of_four = tl.sum(ones, 1)
        found = tl.sum(of_four, 0)
        if (seen < wanted) & (seen + found >= wanted):
            number = seen + (tl.cumsum(of_four, 0) - of_four)[:, None] + tl.cumsum(ones, 1)
            place = tl.max(tl.max(tl.where((ones == 1) & (number == wanted), ids, -1), 1), 0)
        seen += found
    return place


@triton.jit
def _is_single(sums, high, COUNTS: tl.constexpr):
    """Whether a range up to `high` with these sums surely holds one id: then it may end anywhere before the next."""
    if COUNTS:
        return sums == 1
    else:
        least = _weight(high)  # but for the last bits of exp no id of the range has less
        return (least >= 8) & (sums < least + least // 2)


@triton.jit
def _search(
    source,
    space,
    top,
    sharpness,
    cut,
    last,
    share,
    limit,
    edge,
    COUNTS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut that keeps what reaches the limit, of what the given one keeps."""
    limit, low, below, high, upto = _narrow_row(
        source, top, sharpness, cut, last, share, limit, edge, COUNTS, VOCAB, BLOCK
    )
    if upto >= limit:
        found = _copy_of_row(source, space, top, sharpness, cut, last, low, high, VOCAB, BLOCK)
        while (high - low > 1) & (found > BLOCK):
            low, below, high, upto = _narrow_copy(space, found, limit, low, below, high, upto, COUNTS, BLOCK)
            found = _copy_of_copy(space, found, low, high, BLOCK)
        if high - low > 1:
            tile = tile_of(BLOCK)
            rank = tl.load(space + tile, mask=tile < found, other=_NO_RANK)
            measure = _measure(rank, COUNTS)
            zeros = tl.zeros([BLOCK // 4], tl.int32 if COUNTS else tl.int64)
            base = below
            while (high - low > 1) & (_is_single(upto - below, high, COUNTS) == 0):
                middle = low + (high - low) // 2
                sums = base + tl.sum(_up_to(zeros, rank, measure, middle), 0)
                _, low, below, high, upto = _halve(sums, middle, limit, low, below, high, upto)
        # Of the ties at the last rank as many are kept, lowest ids first, as the limit takes. A single id is kept.
        wanted = limit - below
        ties = upto - below
        if not COUNTS:
            each = _weight(high)
            wanted = (wanted + each - 1) // each
            ties = ties // each
        if wanted < ties:
            last = _last_tie(source, top, sharpness, cut, last, high, wanted, VOCAB, BLOCK)
        elif high < cut:
            last = tl.full((), VOCAB - 1, tl.int32)
        cut = high
    return cut, last


@triton.jit
def cut_by_count(source, space, top, sharpness, cut, last, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Keeps the best `top_k`, int64, of what is kept. `space`: int32 `[vocab]`, to work in."""
    return _search(source, space, top, sharpness, cut, last, 0.0, top_k, 0.0, True, VOCAB, BLOCK)


@triton.jit
def cut_by_weight(source, space, top, sharpness, cut, last, top_p, edge, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Keeps the best of what is kept until their share of its weight reaches `top_p`, float64; at least one. `edge`,
    float32, is the scaled logit at the cut of a row like this one, 0 for none: what is kept does not depend on it."""
    nothing = tl.zeros((), tl.int64)
    return _search(source, space, top, sharpness, cut, last, top_p, nothing, edge, False, VOCAB, BLOCK)


@triton.jit
def following_edge(edge, top, sharpness, cut):
    """Where to look next: the scaled logit at this cut, float32, or, since cuts of like rows scatter, a quarter of the
    way there from where they have been."""
    found = top * sharpness - cut.to(tl.float32, bitcast=True)
    return tl.where((edge == 0.0) | (tl.abs(found - edge) > 4.0 * _REACH), found, edge + (found - edge) * 0.25)


@triton.jit
def _uniform(key, position):
    """float64 in (0, 1): `wkvm_core.kernels.splitmix.uniform` of one int64 key and position."""
    x = key + position * _GAMMA + _GAMMA
    x = (x ^ ((x >> 30) & _MASK_30)) * _FIRST
    x = (x ^ ((x >> 27) & _MASK_27)) * _SECOND
    x = x ^ ((x >> 31) & _MASK_31)
    return (((x >> 12) & _MASK_12).to(tl.float64) + _HALF) * _ULP


@triton.jit
def _weights(x, ids, top, sharpness, cut, last, floor):
    """Weights, int64, of ids with logits x: 0 where a limit or the floor, float32 in shares of the best, drops them."""
    share = _share(_ranks(x, ids, top, sharpness, cut, last))
    return tl.where(share >= floor, (share * _ONE).to(tl.int64), 0)


@triton.jit
def draw(
    source,
    top,
    sharpness,
    cut,
    last,
    floor,
    key,
    position,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """An id, int32, of the kept ones that have at least `floor` of the best one's probability, by inversion in the
    order of ids."""
    tile = tile_of(BLOCK)
    blocks = tl.arange(0, NUM_BLOCKS)
    sums = tl.zeros([NUM_BLOCKS], tl.int64)
    x = _logits(source, tile, VOCAB)
    for start in tl.range(0, VOCAB, BLOCK):
        following = _logits(source, start + BLOCK + tile, VOCAB)
        weight = _weights(x, start + tile, top, sharpness, cut, last, floor)
        sums = tl.where(blocks == start // BLOCK, tl.sum(tl.sum(weight, 1), 0), sums)
        x = following
    total = tl.sum(sums, 0)
    target = tl.minimum((_uniform(key, position) * total.to(tl.float64)).to(tl.int64), total - 1)
    is_passed = tl.cumsum(sums, 0) <= target
    start = tl.sum(is_passed.to(tl.int32), 0) * BLOCK
    before = tl.sum(tl.where(is_passed, sums, 0), 0)
    weight = _weights(_logits(source, start + tile, VOCAB), start + tile, top, sharpness, cut, last, floor)
    of_four = tl.sum(weight, 1)
    running = before + (tl.cumsum(of_four, 0) - of_four)[:, None] + tl.cumsum(weight, 1)
    return start + tl.sum(tl.sum((running <= target).to(tl.int32), 1), 0)
