"""Host memory that the copy engine of a GPU reads and writes by itself."""

from __future__ import annotations

import torch

from wkvm_core.errors import DeviceLost


def pin(block: memoryview) -> None:
    """Pins memory that lives as long as the process, page by page; later copies from and to it wait for nobody. Raises
    DeviceLost when the driver refuses."""
    if not len(block):
        return
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), len(block), 0)  # type: ignore[no-untyped-call]
    if int(status):
        raise DeviceLost(f"{len(block)} bytes of host memory cannot be pinned (error {int(status)})")
