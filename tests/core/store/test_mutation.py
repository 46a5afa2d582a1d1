from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from wkvm_core.errors import Refused
from wkvm_core.state.layout import StateFamily, StateLayout
from wkvm_core.store import mutation
from wkvm_core.store.mutation import mutate, rule_of
from wkvm_core.store.planes import Plane, Planes
from wkvm_proto.names import ErrorCode

DTYPES = ["float32", "bfloat16", "float16"]
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}


def layout(dtype: str = "float32") -> StateLayout:
    wkv = StateFamily("wkv", (3, 8, 8), dtype, 4, sharded_axis=0, is_matrix=True)
    return StateLayout((StateFamily("shift", (21,), "bfloat16", 4), wkv))


def block(of: StateLayout, seed: int) -> memoryview:
    """A state with every family filled."""
    memory = memoryview(bytearray(of.slot_bytes))
    rng = np.random.default_rng(seed)
    for family in of.families:
        Planes(of, memory).write(family, rng.standard_normal((family.layers, *family.shape), np.float32))
    return memory


def wkv(of: StateLayout, memory: memoryview) -> Plane:
    return Planes(of, memory).read(of.families[1])


def run(of: StateLayout, name: str, params: dict[str, Any], others: Sequence[memoryview] = ()) -> Plane:
    """The new wkv of the state of seed 0; everything else is self's, and no state that was read has changed."""
    own, out = block(of, 0), memoryview(bytearray(of.slot_bytes))
    before = [bytes(memory) for memory in (own, *others)]
    rule = rule_of(name, params, of)
    assert len(rule.others) == len(others)
    told = mutate(rule, of, own, others, out)
    assert [bytes(memory) for memory in (own, *others)] == before
    shift = of.families[0]
    assert np.array_equal(Planes(of, out).read(shift), Planes(of, own).read(shift))
    found = wkv(of, out)
    assert told["wkv"]["after"] == pytest.approx(np.linalg.norm(found), rel=ROUNDING[of.families[1].dtype])
    return found


def refusal(of: StateLayout, name: str, params: dict[str, Any], others: Sequence[memoryview] = ()) -> Refused:
    with pytest.raises(Refused) as caught:
        run(of, name, params, others)
    return caught.value


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_rule_gives_what_it_says(dtype: str) -> None:
    of = layout(dtype)
    own, a, b = (wkv(of, block(of, seed)) for seed in range(3))
    one, two = block(of, 1), block(of, 2)

    def close(found: Plane, expected: Plane) -> bool:
        return bool(np.linalg.norm(found - expected) <= ROUNDING[dtype] * np.linalg.norm(expected))

    assert close(run(of, "decay", {"alpha": 0.5}), own * 0.5)
    assert close(run(of, "merge", {"other": "x", "weight": 0.25}, [one]), 0.75 * own + 0.25 * a)
    found = run(of, "add_delta", {"base": "x", "other": "y", "scale": 2.0}, [one, two])
    assert close(found, own + 2 * (b - a))
    assert close(run(of, "consolidate", {"others": ["x", "y"]}, [one, two]), (own + a + b) / 3)
    found = run(of, "consolidate", {"others": ["x", "y"], "weights": [2, 1, 1]}, [one, two])
    assert close(found, (2 * own + a + b) / 4)
    assert not run(of, "zero", {}).any()


def test_layers_and_heads_that_are_not_named_keep_every_bit() -> None:
    of = layout()
    own = wkv(of, block(of, 0))
    found = run(of, "decay", {"alpha": 0.0, "layers": [1, 3], "heads": [2]})
    changed = np.zeros(own.shape[:2], bool)
    changed[[1, 3], 2] = True
    assert not found[changed].any()
    assert np.array_equal(found[~changed], own[~changed])
    found = run(of, "zero", {"layers": [0], "families": ["wkv"]})
    assert not found[0].any()
    assert np.array_equal(found[1:], own[1:])


def test_the_arc_ends_at_both_states_and_keeps_the_norm_between_equal_ones() -> None:
    of = layout()
    own, other = wkv(of, block(of, 0)), wkv(of, block(of, 1))
    assert np.allclose(run(of, "interpolate", {"other": "x", "t": 0.0}, [block(of, 1)]), own, atol=1e-6)
    assert np.allclose(run(of, "interpolate", {"other": "x", "t": 1.0}, [block(of, 1)]), other, atol=1e-6)
    middle = run(of, "interpolate", {"other": "x", "t": 0.5}, [block(of, 1)])
    norms = [np.linalg.norm(x, axis=(-2, -1)) for x in (own, middle, other)]
    assert np.allclose(norms[1], (norms[0] + norms[2]) / 2, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, -1.0])
def test_where_there_is_no_arc_the_way_is_straight(scale: float) -> None:
    of = layout()
    other = block(of, 0)
    Planes(of, other).write(of.families[1], wkv(of, other) * np.float32(scale))
    own = wkv(of, block(of, 0))
    found = run(of, "interpolate", {"other": "x", "t": 0.25}, [other])
    assert np.allclose(found, own * (0.75 + 0.25 * scale), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "params", "param"),
    [
        ("melt", {}, "rule"),
        ("decay", {}, "params"),
        ("decay", {"alpha": "half"}, "params"),
        ("decay", {"alpha": float("nan")}, "params"),
        ("decay", {"alpha": 0.5, "beta": 1}, "params"),
        ("decay", {"alpha": 0.5, "layers": [4]}, "layers"),
        ("decay", {"alpha": 0.5, "heads": [-1]}, "params"),
        ("merge", {"other": "x", "weight": 1.5}, "params"),
        ("zero", {"families": ["shift"]}, "families"),
        ("consolidate", {"others": []}, "params"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(name: str, params: dict[str, Any], param: str) -> None:
    error = refusal(layout(), name, params)
    assert (error.code, error.param) == (ErrorCode.BAD_REQUEST, param)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0]])
def test_weights_that_make_no_mean_are_refused(weights: list[float]) -> None:
    of = layout()
    assert refusal(of, "consolidate", {"others": ["x"], "weights": weights}, [block(of, 1)]).param == "weights"


def test_a_result_that_is_not_finite_is_refused() -> None:
    of = layout("float16")
    error = refusal(of, "decay", {"alpha": 1e6})
    assert error.code is ErrorCode.NUMERICAL_ERROR


class Halved(msgspec.Struct, frozen=True):
    by: float

    @property
    def others(self) -> tuple[str, ...]:
        return ()

    def mutate(self, family: StateFamily, own: Plane, others: Sequence[Plane]) -> Plane:
        return own / np.float32(self.by)


def test_a_rule_of_somebody_elses_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> type:
            return Halved

    def points(*, group: str, name: str) -> list[Point]:
        return [Point()] if (group, name) == ("wkvm.mutations", "halved") else []

    monkeypatch.setattr(mutation, "entry_points", points)
    of = layout()
    assert np.allclose(run(of, "halved", {"by": 4.0}), wkv(of, block(of, 0)) / 4)


@pytest.mark.parametrize("value", [1.00390625, 1.01171875, -3.0e38, float("nan"), float("inf"), 1e-40])
def test_bfloat16_is_rounded_to_nearest_even(value: float) -> None:
    of = layout("bfloat16")
    memory = block(of, 0)
    plane = np.full((4, 3, 8, 8), value, np.float32)
    Planes(of, memory).write(of.families[1], plane)
    torch = pytest.importorskip("torch")
    expected = torch.tensor(value).to(torch.bfloat16).float().numpy()
    assert np.array_equal(wkv(of, memory), np.full_like(plane, expected), equal_nan=True)
