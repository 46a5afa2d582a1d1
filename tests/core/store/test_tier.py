from __future__ import annotations

import errno

import pytest

from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode


def fail(tier: DiskTier, code: int) -> Refused:
    """The refusal of a write that the disk fails."""
    with pytest.raises(Refused) as raised, tier.writing():
        raise OSError(code, "the disk")
    return raised.value


@pytest.fixture
def tier() -> DiskTier:
    return DiskTier()


def test_writes_are_taken_until_one_fails_and_then_refused_before_they_begin(tier: DiskTier) -> None:
    with tier.writing():
        pass
    assert fail(tier, errno.EIO).code is ErrorCode.STORE_READ_ONLY
    begun = []
    with pytest.raises(Refused) as raised, tier.writing():
        begun.append(1)
    assert raised.value.code is ErrorCode.STORE_READ_ONLY
    assert not begun


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_its_own_code_and_stays_so(tier: DiskTier, code: int) -> None:
    assert fail(tier, code).code is ErrorCode.STORE_FULL
    with pytest.raises(Refused, match="full"), tier.writing():
        pass


def test_the_refusal_names_the_error_and_no_path(tier: DiskTier) -> None:
    with pytest.raises(Refused) as raised, tier.writing():
        raise OSError(errno.EIO, "the disk", "/somewhere/secret")
    assert "EIO" in raised.value.message
    assert "secret" not in raised.value.message


def test_what_is_no_error_of_the_disk_passes_and_closes_nothing(tier: DiskTier) -> None:
    with pytest.raises(ZeroDivisionError), tier.writing():
        raise ZeroDivisionError
    assert tier.refusal is None


def test_writes_are_taken_again_when_a_new_file_can_be_written(tier: DiskTier) -> None:
    files = CrashingFiles()
    fail(tier, errno.ENOSPC)
    for operation in range(5):
        files.fail(operation, errno.ENOSPC)
        assert not tier.try_again(files)
        files.heal()
    assert tier.try_again(files)
    with tier.writing():
        pass
    assert files.list("") == []


def test_an_open_tier_is_not_probed(tier: DiskTier) -> None:
    files = CrashingFiles()
    assert tier.try_again(files)
    assert files.operations == []
