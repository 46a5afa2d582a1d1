"""From shaped logits to one token a row, so that a row's bits depend on nothing but the row.

Probabilities become integers: the weight of a token is exp(x) * 2**40 cut to int64, x <= 0 being its logit below the
row's best. Sums of integers do not depend on the order of addition, hence not on batch size, on the device's reduction
tree, or on whether a row was ranked whole or only its best part.

Limits first decide which ids are kept, by rank: greater value first, equal values by id. The draw then walks the kept
ids in the order of their ids, so that a limit that cuts nothing changes nothing.
"""

from __future__ import annotations

import torch

_ONE = 2.0**40
MAX_VOCAB_SIZE = 1 << 22
"""So that a row's weights add up within int64."""
NO_LIMIT = (1 << 63) - 1


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greatest value and its lowest id of each row of `[rows, vocab]`: float32 and int64 `[rows]`.

    A row with NaN or +inf, or of -inf alone, gives a value that is not finite.
    """
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorised and torch's is not (12x); both take the first of equals and any NaN before it.
        ids = torch.from_numpy(logits.numpy().argmax(1))
        return logits.gather(1, ids[:, None]).squeeze(1), ids
    values, ids = logits.max(1)
    return values, ids


def share(x: torch.Tensor) -> torch.Tensor:
    """exp(x), float32: the only rounding that differs between devices."""
    return x.exp()


def weights(x: torch.Tensor) -> torch.Tensor:
    """int64 weights of x <= 0; 2**40 for x = 0."""
    return _weight(share(x))


def _weight(shares: torch.Tensor) -> torch.Tensor:
    return (shares * _ONE).to(torch.int64)


def log_weight(total: torch.Tensor) -> torch.Tensor:
    """Natural logarithm, float64, of a sum of weights."""
    return (total.to(torch.float64) / _ONE).log()


def ranked(x: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` greatest of each row, best first, equal values by id: int64 `[rows, count]`.

    Value and id become one integer without equals, so partial and full selection agree.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0 makes -0.0 the equal of 0.0
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)
    vocab_size = x.shape[1]
    keys = (ordered << 32).add_(torch.arange(vocab_size - 1, -1, -1, device=x.device))
    if 4 * count >= vocab_size:
        top = keys.sort(dim=1, descending=True).values[:, :count]
    else:
        top = keys.topk(count, dim=1).values
    return vocab_size - 1 - (top & 0xFFFFFFFF)


def pick(weight: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Column of each row chosen with probability proportional to int64 `weight`, by inversion: int64 `[rows]`."""
    sums = weight.cumsum(1)
    total = sums[:, -1]
    target = torch.minimum((uniforms * total.to(torch.float64)).to(torch.int64), total - 1)
    chosen = torch.searchsorted(sums, target[:, None], right=True).squeeze(1)
    return chosen.clamp_(max=weight.shape[1] - 1)


def draw_whole(x: torch.Tensor, min_p: torch.Tensor | None, uniforms: torch.Tensor) -> torch.Tensor:
    """Ids drawn from rows that only min-p cuts: keep what has at least `min_p` of the best one's probability.

    x: float32 `[rows, vocab]`, at most 0; min_p (None = all 0), uniforms: float64 `[rows]`. min_p counts as the float32
    next to it.
    """
    shares = share(x)
    weight = _weight(shares)
    if min_p is not None:
        weight *= shares >= min_p.to(torch.float32)[:, None]
    return pick(weight, uniforms)


class Cut:
    """Limits of each row, `[rows, 1]`: top_k int64 (0 = off), top_p, typical_p and min_p float64."""

    def __init__(self, top_k: torch.Tensor, top_p: torch.Tensor, typical_p: torch.Tensor, min_p: torch.Tensor) -> None:
        self.top_k = top_k[:, None]
        self.top_p = top_p[:, None]
        self.typical_p = typical_p[:, None]
        self.min_p = min_p[:, None]

    def rows(self, rows: torch.Tensor) -> Cut:
        """The limits of some of the rows."""
        chosen = (part.squeeze(1)[rows] for part in (self.top_k, self.top_p, self.typical_p, self.min_p))
        return Cut(*chosen)


def draw_ranked(
    x: torch.Tensor, total: torch.Tensor, cut: Cut, uniforms: torch.Tensor, count: int, *, typical: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids drawn after top-k, top-p, typical-p and min-p, each over what the one before kept; int64 `[rows]`.

    Looks at the `count` best of each row. The second value, bool `[rows]`, tells whether that was enough; where it
    was, any greater count gives the same id. total: int64 `[rows]`, the weight of the whole row, read where top-k is
    off; typical: some row has typical_p below 1.

    top-k keeps k ids. top-p keeps the best until their share reaches top_p. typical-p (Meister et al. 2022) keeps
    those whose information is nearest to the entropy until their share reaches typical_p. min-p keeps what has at
    least min_p of the best remaining one's probability. Each keeps at least one. Shares are reached in whole weights:
    a limit is rounded up to the next integer.
    """
    vocab_size = x.shape[1]
    ids = ranked(x, count)
    x = x.gather(1, ids)
    shares = share(x)
    weight = _weight(shares)
    rank = torch.arange(count, device=x.device)
    by_k = cut.top_k > 0
    keep = (rank < cut.top_k) | ~by_k
    weight = weight * keep
    sums = weight.cumsum(1)
    before = sums - weight
    base = torch.where(by_k, sums[:, -1:], total[:, None]).to(torch.float64)
    limit = torch.where(cut.top_p < 1.0, (cut.top_p * base).ceil().to(torch.int64), NO_LIMIT)
    keep = keep & ((before < limit) | (rank == 0))
    enough = torch.where(by_k, cut.top_k <= count, sums[:, -1:] >= limit) | (count >= vocab_size)
    if typical:
        keep = keep & _typical(x, shares, weight * keep, keep, cut.typical_p)
    top = (shares * keep).amax(1, keepdim=True).to(torch.float64)
    keep = keep & (shares >= (cut.min_p * top).to(torch.float32))
    weight = weight * keep
    if count == vocab_size:
        return pick(torch.empty_like(weight).scatter_(1, ids, weight), uniforms), enough.squeeze(1)
    ids, order = ids.sort(1)
    chosen = pick(weight.gather(1, order), uniforms)
    return ids.gather(1, chosen[:, None]).squeeze(1), enough.squeeze(1)


def _typical(
    x: torch.Tensor, shares: torch.Tensor, weight: torch.Tensor, keep: torch.Tensor, typical_p: torch.Tensor
) -> torch.Tensor:
    """Mask of the ids that typical-p keeps, bool like x; rows with typical_p = 1 keep all.

    With information -log p = |x| + log Z and entropy = mean |x| + log Z, their distance is | |x| - mean |x| |.
    """
    depth = torch.where(shares > 0, -x, 0.0)
    total = weight.sum(1, keepdim=True).to(torch.float64)
    mean = (_weight(shares * depth) * keep).sum(1, keepdim=True).to(torch.float64) / total
    distance = torch.where(keep & (weight > 0), (depth.to(torch.float64) - mean).abs(), torch.inf)
    order = distance.sort(dim=1, stable=True).indices
    sorted_weight = weight.gather(1, order)
    before = (sorted_weight.cumsum(1) - sorted_weight).to(torch.float64)
    near = (before < typical_p * total) | (torch.arange(x.shape[1], device=x.device) == 0)
    return torch.zeros_like(keep).scatter_(1, order, near) | (typical_p >= 1.0)
