"""Rules that make a new state of old ones. They act on families of matrices; all else of the new state is self's.

A rule of somebody else's is an entry point of the group `wkvm.mutations`, named as the rule and loaded when it is first
asked for: a class that msgspec can make of the call's parameters, with `others` and `mutate` as in `Rule`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from wkvm_core.errors import Refused
from wkvm_core.state.layout import StateFamily, StateLayout
from wkvm_core.store.planes import FLOATS, Plane, Planes
from wkvm_proto.names import ErrorCode

GROUP = "wkvm.mutations"
MOST_OTHERS = 64
Factor = Annotated[float, Meta(ge=-1e6, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Indices = tuple[Annotated[int, Meta(ge=0)], ...] | None
Handle = Annotated[str, Meta(min_length=1, max_length=160)]


class Rule(Protocol):
    """Parameters of one mutation, checked."""

    @property
    def others(self) -> tuple[str, ...]:
        """Handles of the states that it reads besides self."""
        ...

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """float32 `[layers, *shape]` of one family in, the same out; `own` may be overwritten."""
        ...


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    @property
    def others(self) -> tuple[str, ...]:
        """None unless said."""
        return ()


class Decay(_Struct, frozen=True):
    """Everything that was read fades by alpha, in some layers and heads or in all."""

    alpha: Factor
    layers: Indices = None
    heads: Indices = None

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """See `Rule`."""
        layers = _chosen(self.layers, family.layers, "layers")
        heads = _chosen(self.heads, family.shape[0], "heads")
        own[np.ix_(layers, heads)] *= np.float32(self.alpha)
        return own


class Merge(_Struct, frozen=True):
    """The weighted mean of self and another."""

    other: Handle
    weight: Share

    @property
    def others(self) -> tuple[str, ...]:
        """See `Rule`."""
        return (self.other,)

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """See `Rule`."""
        return _weighted((own, *others), (1.0 - self.weight, self.weight))


class Interpolate(_Struct, frozen=True):
    """From self to another along the arc between their directions, matrix by matrix; norms go in a straight line."""

    other: Handle
    t: Share

    @property
    def others(self) -> tuple[str, ...]:
        """See `Rule`."""
        return (self.other,)

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """See `Rule`."""
        a, b = own.astype(np.float64), others[0].astype(np.float64)
        norm_a, norm_b = (np.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (a, b))
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = (a * b).sum((-2, -1), keepdims=True) / (norm_a * norm_b)
            angle = np.arccos(np.clip(cosine, -1.0, 1.0))
            arc = (np.sin((1.0 - self.t) * angle) * a / norm_a + np.sin(self.t * angle) * b / norm_b) / np.sin(angle)
        straight = (1.0 - self.t) * a + self.t * b
        # No arc between equal or opposite directions, nor to a matrix of zeros.
        has_arc = np.isfinite(cosine) & (np.abs(cosine) < 1.0 - 1e-9)
        norms = (1.0 - self.t) * norm_a + self.t * norm_b
        return np.where(has_arc, arc * norms, straight).astype(np.float32)


class AddDelta(_Struct, frozen=True):
    """What lies between two states, added to self."""

    base: Handle
    other: Handle
    scale: Factor = 1.0

    @property
    def others(self) -> tuple[str, ...]:
        """See `Rule`."""
        return self.base, self.other

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """See `Rule`."""
        base, other = others
        own += np.float32(self.scale) * (other - base)
        return own


class Zero(_Struct, frozen=True):
    """Forgets, in some layers and families or in all."""

    layers: Indices = None
    families: tuple[str, ...] | None = None

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """See `Rule`."""
        if self.families is None or family.name in self.families:
            own[_chosen(self.layers, family.layers, "layers")] = 0.0
        return own


class Consolidate(_Struct, frozen=True):
    """The mean of self and several others; weights are of self first, and equal unless told."""

    others_: Annotated[tuple[Handle, ...], Meta(min_length=1, max_length=MOST_OTHERS)] = msgspec.field(name="others")
    weights: tuple[Annotated[float, Meta(ge=0.0, le=1e6)], ...] | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """See `Rule`."""
        return self.others_

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        """See `Rule`."""
        weights = self.weights or (1.0,) * (len(others) + 1)
        if len(weights) != len(others) + 1:
            raise _refused("weights", f"{len(weights)} weights for self and {len(others)} others")
        total = math.fsum(weights)
        if not total > 0.0:
            raise _refused("weights", "the weights add up to nothing")
        return _weighted((own, *others), [weight / total for weight in weights])


RULES: Mapping[str, type[Any]] = {
    "decay": Decay,
    "merge": Merge,
    "interpolate": Interpolate,
    "add_delta": AddDelta,
    "zero": Zero,
    "consolidate": Consolidate,
}


def rule_of(name: str, params: Mapping[str, Any], layout: StateLayout) -> Rule:
    """The rule of a call. Refuses an unknown one, and parameters that do not fit it or the layout."""
    kind = RULES.get(name) or _plugged_in(name)
    if kind is None:
        raise Refused(
            ErrorCode.BAD_REQUEST, f"there is no rule {name[:100]!r}; rules: {', '.join(RULES)}", param="rule"
        )
    try:
        rule: Rule = msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise _refused("params", str(error)) from None
    if isinstance(rule, Zero) and rule.families is not None:
        known = [family.name for family in layout.families if family.is_matrix]
        for family in rule.families:
            if family not in known:
                raise _refused("families", f"{family[:100]!r} is no family of matrices; those are {', '.join(known)}")
    return rule


def mutate(
    rule: Rule, layout: StateLayout, own: memoryview, others: Sequence[memoryview], out: memoryview
) -> dict[str, dict[str, float]]:
    """Writes the new state into `out`, a block as the others are and none of them; returns of each family of matrices
    the norm before and after and the relative distance between. Refuses a result that is not finite, and parameters
    that name layers or heads which are not there; `out` is worth nothing then."""
    out[:] = own
    told = {}
    for family in layout.families:
        if not family.is_matrix:
            continue
        before = Planes(layout, own).read(family)
        planes = [Planes(layout, other).read(family) for other in others]
        with np.errstate(over="ignore", invalid="ignore"):
            after = rule.mutate(family, before.copy(), planes)
        if after.shape != before.shape or after.dtype != np.float32:
            message = f"the rule gave {after.dtype} {list(after.shape)} for {family.name} {list(before.shape)}"
            raise Refused(ErrorCode.INTERNAL, message)
        written = Planes(layout, out)
        written.write(family, after)
        if not np.isfinite(written.read(family)).all():
            raise Refused(ErrorCode.NUMERICAL_ERROR, f"the new state is not finite in {family.name}")
        norm = float(np.linalg.norm(before.astype(np.float64)))
        moved = float(np.linalg.norm(after.astype(np.float64) - before))
        told[family.name] = {
            "before": norm,
            "after": float(np.linalg.norm(after.astype(np.float64))),
            "distance": moved / norm if norm else moved,
        }
    return told


def distances(layout: StateLayout, one: memoryview, other: memoryview) -> dict[str, tuple[float, ...]]:
    """Of each family of floats and each of its layers the norm of the difference of two blocks, relative to the first
    one's (to 1 where that is zero)."""
    told = {}
    for family in layout.families:
        if family.dtype in FLOATS:
            a, b = (Planes(layout, block).read(family).astype(np.float64) for block in (one, other))
            axes = tuple(range(1, a.ndim))
            norms, away = np.sqrt((a * a).sum(axes)), np.sqrt(((b - a) ** 2).sum(axes))
            told[family.name] = tuple((away / np.where(norms > 0.0, norms, 1.0)).tolist())
    return told


def _plugged_in(name: str) -> type[Any] | None:
    for point in entry_points(group=GROUP, name=name):
        kind: type[Any] = point.load()
        return kind
    return None


def _chosen(indices: Indices, count: int, param: str) -> list[int]:
    if indices is None:
        return list(range(count))
    for index in indices:
        if index >= count:
            raise _refused(param, f"there is no {index} of {param}: the state has {count}")
    return sorted(set(indices))


def _weighted(planes: Sequence[Plane], weights: Sequence[float]) -> Plane:
    total = np.zeros(planes[0].shape, np.float64)
    for plane, weight in zip(planes, weights, strict=True):
        total += weight * plane
    return total.astype(np.float32)


def _refused(param: str, message: str) -> Refused:
    return Refused(ErrorCode.BAD_REQUEST, message, param=param)
