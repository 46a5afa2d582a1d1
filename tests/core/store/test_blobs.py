from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from tests.core.store.states import FINGERPRINT, LAYOUT, block, header
from tests.core.store.test_objects import names
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.state.layout import StateFamily, StateLayout
from wkvm_core.store.blob import spans
from wkvm_core.store.blobs import Blobs
from wkvm_core.store.files import Files, RealFiles
from wkvm_core.store.host import HostArena
from wkvm_core.store.objects import Swept
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def files() -> CrashingFiles:
    return CrashingFiles()


@pytest.fixture
def blobs(files: CrashingFiles) -> Blobs:
    return Blobs(files, DiskTier())


def dirty() -> memoryview:
    """A block that somebody used before."""
    return memoryview(bytearray(b"\xaa" * LAYOUT.slot_bytes))


@pytest.mark.parametrize("kind", ["real", "crashing"])
def test_a_state_comes_back_byte_for_byte_into_a_used_block(kind: str, tmp_path: Path) -> None:
    files: Files = RealFiles(str(tmp_path)) if kind == "real" else CrashingFiles()
    blobs = Blobs(files, DiskTier())
    digest = blobs.put("a", header(), block())
    into = dirty()
    assert blobs.get("a", digest, LAYOUT, into) == header()
    assert into == block()


def test_a_state_is_read_straight_into_a_block_of_the_host_arena(blobs: Blobs) -> None:
    arena = HostArena(2, LAYOUT.slot_bytes)
    blobs.get("a", blobs.put("a", header(), block()), LAYOUT, arena.view(1))
    assert arena.view(1) == block()
    assert bytes(arena.view(0)) == bytes(LAYOUT.slot_bytes)


def test_the_file_is_safetensors_with_its_payload_at_4_kib(blobs: Blobs, files: CrashingFiles) -> None:
    path = blobs.path(blobs.put("a", header(), block()))
    data = files.read(path, 0, files.size(path))
    assert (8 + int.from_bytes(data[:8], "little")) % 4096 == 0
    layout = StateLayout(tuple(family for family in LAYOUT.families if family.dtype != "bfloat16"))
    plain = blobs.path(blobs.put("a", msgspec.structs.replace(header(), layout=layout), block(layout=layout)))
    tensors = safetensors.numpy.load(files.read(plain, 0, files.size(plain)))
    assert sorted(tensors) == sorted(family.name for family in layout.families)
    for family, (start, stop) in zip(layout.families, spans(layout), strict=True):
        assert tensors[family.name].shape == (family.layers, *family.shape)
        assert tensors[family.name].dtype == np.dtype(family.dtype)
        assert tensors[family.name].tobytes() == bytes(block(layout=layout)[start:stop])


def test_equal_states_are_one_file_whatever_lies_in_the_gaps_of_their_slots(blobs: Blobs, files: CrashingFiles) -> None:
    digests = {blobs.put("a", header(), block(gap=gap)) for gap in (0, 1, 255)}
    assert len(digests) == 1 == len(names(files, "blobs"))


@pytest.mark.parametrize(
    "other",
    [
        header(tokens=42),
        header(tail=b""),
        header(ids=None),
        msgspec.structs.replace(header(), fingerprint=msgspec.structs.replace(FINGERPRINT, numerics="float16")),
    ],
)
def test_whatever_differs_in_the_header_is_another_file(blobs: Blobs, other: object) -> None:
    assert isinstance(other, type(header()))
    assert blobs.put("a", header(), block()) != blobs.put("a", other, block())


def test_a_tenants_digest_tells_nothing_of_anothers_equal_state(blobs: Blobs) -> None:
    digest = blobs.put("a", header(), block())
    assert blobs.put("b", header(), block()) != digest
    with pytest.raises(Refused) as raised:
        blobs.get("b", digest, LAYOUT, dirty())
    assert raised.value.code is ErrorCode.STATE_DAMAGED


def test_a_flipped_bit_anywhere_is_found_and_nothing_is_handed_out(files: CrashingFiles, blobs: Blobs) -> None:
    digest = blobs.put("a", header(), block())
    size = files.size(blobs.path(digest))
    random = Random(7)
    bits = [random.randrange(8 * size) for _ in range(100)] + list(range(64)) + [8 * size - 1]
    for bit in bits:
        files.flip(blobs.path(digest), bit)
        into = dirty()
        with pytest.raises(Refused) as raised:
            blobs.get("a", digest, LAYOUT, into)
        assert raised.value.code is ErrorCode.STATE_DAMAGED
        assert bytes(into) == bytes(len(into))
        assert not blobs.exists(digest), "put aside"
        assert blobs.put("a", header(), block()) == digest
    assert blobs.get("a", digest, LAYOUT, dirty()) == header()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4095, 4096, 4097])
def test_a_file_cut_off_is_damaged(blobs: Blobs, files: CrashingFiles, size: int) -> None:
    digest = blobs.put("a", header(), block())
    path = blobs.path(digest)
    cut = files.read(path, 0, size)
    files.unlink(path)
    writer = files.create(path)
    writer.write(cut)
    with pytest.raises(Refused) as raised:
        blobs.get("a", digest, LAYOUT, dirty())
    assert raised.value.code is ErrorCode.STATE_DAMAGED


def test_a_missing_file_is_damaged(blobs: Blobs, files: CrashingFiles) -> None:
    digest = blobs.put("a", header(), block())
    files.unlink(blobs.path(digest))
    with pytest.raises(Refused, match="missing"):
        blobs.get("a", digest, LAYOUT, dirty())


def test_a_read_that_the_disk_fails_leaves_the_block_zero_and_the_file_in_place(
    blobs: Blobs, files: CrashingFiles
) -> None:
    digest = blobs.put("a", header(), block())
    files.read_error = errno.EIO
    into = dirty()
    with pytest.raises(Refused, match="cannot be read"):
        blobs.get("a", digest, LAYOUT, into)
    assert bytes(into) == bytes(len(into))
    files.read_error = 0
    assert blobs.get("a", digest, LAYOUT, into) == header()


OTHERS = [
    StateLayout((StateFamily(name="other", shape=(7,), dtype="float32", layers=1),)),
    StateLayout(tuple(msgspec.structs.replace(f, name=f.name.upper()) for f in LAYOUT.families)),
]


@pytest.mark.parametrize("layout", OTHERS)
def test_a_state_of_another_layout_is_refused_and_stays_where_it_is(blobs: Blobs, layout: StateLayout) -> None:
    digest = blobs.put("a", header(), block())
    into = memoryview(bytearray(b"\xaa" * layout.slot_bytes))
    with pytest.raises(Refused) as raised:
        blobs.get("a", digest, layout, into)
    assert raised.value.code is ErrorCode.FINGERPRINT_MISMATCH
    assert bytes(into) == bytes(len(into))
    assert blobs.get("a", digest, LAYOUT, dirty()) == header()


def test_a_full_disk_refuses_new_states_and_still_reads_old_ones(blobs: Blobs, files: CrashingFiles) -> None:
    digest = blobs.put("a", header(), block())
    files.fail(0, errno.ENOSPC, forever=True)
    for _ in range(2):
        with pytest.raises(Refused) as raised:
            blobs.put("a", header(), block(seed=1))
        assert raised.value.code is ErrorCode.STORE_FULL
    assert blobs.get("a", digest, LAYOUT, dirty()) == header()
    blobs.check("a", digest)


def test_after_any_crash_a_state_is_whole_or_not_there() -> None:
    files = CrashingFiles()
    blobs = Blobs(files, DiskTier())
    acknowledged = [(blobs.put("a", header(), block(seed)), seed, len(files.operations)) for seed in (0, 1)]
    for point in files.crash_points():
        for seed in range(8):
            after = files.after_crash(seed, point)
            reopened = Blobs(after, DiskTier())
            for digest, of, number in acknowledged:
                if number <= point or reopened.exists(digest):
                    into = dirty()
                    assert reopened.get("a", digest, LAYOUT, into) == header()
                    assert into == block(of)
            reopened.sweep({digest for digest, _, number in acknowledged if number <= point})
            assert len(names(after, "blobs")) == sum(number <= point for _, _, number in acknowledged)


def test_the_bytes_of_the_format_stay_as_they_are(blobs: Blobs) -> None:
    assert blobs.put("a", header(), block()) == "18ca75c1129cb82ddc7120e77e28a94cf07252f7a00700374a6243749373e361"


def test_a_sweep_keeps_referenced_states_only(blobs: Blobs) -> None:
    kept, orphan = (blobs.put("a", header(), block(seed)) for seed in (0, 1))
    assert blobs.sweep({kept}) == Swept(temporaries=0, orphans=1)
    assert (blobs.exists(kept), blobs.exists(orphan)) == (True, False)
    blobs.remove(kept)
    assert not blobs.exists(kept)


def test_a_process_killed_while_it_writes_leaves_whole_states_only(tmp_path: Path) -> None:
    script = (
        "import itertools\n"
        "from tests.core.store.states import block, header\n"
        "from wkvm_core.store.blobs import Blobs\n"
        "from wkvm_core.store.files import RealFiles\n"
        "from wkvm_core.store.tier import DiskTier\n"
        f"blobs = Blobs(RealFiles({str(tmp_path)!r}), DiskTier())\n"
        "for seed in itertools.count():\n"
        "    print(blobs.put('a', header(), block(seed)), flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    digests = [process.stdout.readline().strip() for _ in range(20)]
    process.kill()
    digests += [line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.wait()
    process.stdout.close()
    blobs = Blobs(RealFiles(str(tmp_path)), DiskTier())
    blobs.sweep(set(digests))
    for seed, digest in enumerate(digests):
        into = dirty()
        blobs.get("a", digest, LAYOUT, into)
        assert into == block(seed)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(f"{digest}.safetensors" for digest in digests)
