from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from wkvm_core.models.checkpoint.fingerprint import CACHE_NAME, cached_fingerprint, model_fingerprint


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_order_and_strides_do_not_matter() -> None:
    given = tensors()
    turned = {"b": given["b"], "a": given["a"].t().contiguous().t()}
    assert model_fingerprint(turned) == model_fingerprint(given)


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.arange(6.0).view(3, 2)},
        {"a": torch.arange(6.0).view(2, 3).bfloat16()},
        {"a": torch.arange(1.0, 7.0).view(2, 3)},
        {"c": torch.zeros(1)},
    ],
)
def test_names_shapes_dtypes_and_values_matter(changed: dict[str, torch.Tensor]) -> None:
    assert model_fingerprint(tensors() | changed) != model_fingerprint(tensors())


def test_it_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"first")
    first = cached_fingerprint(tensors(), [file], cache_from_bytes=1)
    other = {"a": torch.zeros(1)}
    assert cached_fingerprint(other, [file], cache_from_bytes=1) == first
    os.utime(file, ns=(1, 1))
    assert cached_fingerprint(other, [file], cache_from_bytes=1) == model_fingerprint(other)


def test_a_damaged_cache_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"first")
    (tmp_path / CACHE_NAME).write_bytes(b"{nonsense")
    assert cached_fingerprint(tensors(), [file], cache_from_bytes=1) == model_fingerprint(tensors())
    assert b"nonsense" not in (tmp_path / CACHE_NAME).read_bytes()


def test_small_models_leave_no_file_behind(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"first")
    cached_fingerprint(tensors(), [file])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(b"first")
    (folder / CACHE_NAME).mkdir()  # nobody, root included, can replace a folder by a file
    (folder / CACHE_NAME / "x").touch()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert cached_fingerprint(tensors(), [file], cache_from_bytes=1) == model_fingerprint(tensors())
    finally:
        folder.chmod(stat.S_IRWXU)
    assert sorted(entry.name for entry in folder.iterdir()) == [CACHE_NAME, "model.safetensors"]
