from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from wkvm_core.state.chain import chain_digests, chain_root
from wkvm_core.state.snapshot import Segment
from wkvm_proto.columns import pack_u32

ROOT = chain_root("tenant", "fingerprint", 0, "")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60), st.data())
def test_a_digest_depends_on_the_ids_before_it_alone(ids: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(ids)))
    (inside,) = chain_digests(ROOT, pack_u32(ids), [length])
    (alone,) = chain_digests(ROOT, pack_u32(ids[:length]), [length])
    assert inside == alone
    assert len(inside) == 16


def test_one_pass_gives_the_digests_of_many_lengths() -> None:
    ids = pack_u32(range(100))
    lengths = [0, 1, 7, 64, 100]
    assert chain_digests(ROOT, ids, lengths) == [chain_digests(ROOT, ids, [n])[0] for n in lengths]
    assert len(set(chain_digests(ROOT, ids, lengths))) == 5


def test_everything_in_the_root_tells_lines_apart() -> None:
    parts = product(("a", "b"), ("f", "g"), (0, 1), ("", "salt"), ("zero", "other"))
    roots = {chain_root(*part) for part in parts}
    assert len(roots) == 32
    assert chain_root("ab", "c", 0, "") != chain_root("a", "bc", 0, "")


def test_segments_are_shared_by_forks_and_flatten_in_order() -> None:
    trunk = Segment(pack_u32([1, 2]))
    left, right = Segment(pack_u32([3]), trunk), Segment(pack_u32([4, 5]), trunk)
    assert (left.tokens, right.tokens) == (3, 4)
    assert left.flatten() == pack_u32([1, 2, 3])
    assert right.flatten() == pack_u32([1, 2, 4, 5])
