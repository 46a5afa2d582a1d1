from __future__ import annotations

from wkvm_core.state.layout import StateFamily, StateLayout


def layout(*, dtype: str = "float32") -> StateLayout:
    return StateLayout((StateFamily("wkv", (5, 64, 64), dtype, 6), StateFamily("shift", (321,), "bfloat16", 6)))


def test_families_are_aligned_to_256_bytes_and_slots_to_4_kib() -> None:
    assert layout().offsets == (0, 5 * 64 * 64 * 4 * 6)
    assert all(offset % 256 == 0 for offset in layout().offsets)
    assert layout().slot_bytes % 4096 == 0
    used = 5 * 64 * 64 * 4 * 6 + 321 * 2 * 6
    assert 0 <= layout().slot_bytes - used < 4096 + 256


def test_the_fingerprint_binds_shape_dtype_and_order() -> None:
    a, b = layout().families
    prints = {layout().fingerprint, layout(dtype="bfloat16").fingerprint, StateLayout((b, a)).fingerprint}
    assert len(prints) == 3
    assert layout().fingerprint == layout().fingerprint
