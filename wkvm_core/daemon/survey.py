"""`python -m wkvm_core.daemon.survey FLAGS`: what a core with these flags would find here, as JSON; starts nothing."""

from __future__ import annotations

import os
import sys

import msgspec

from wkvm_core.daemon.config import CoreConfig
from wkvm_core.errors import Refused
from wkvm_proto.settings import BadSettings, resolve
from wkvm_proto.survey import Card, Survey

EXIT_BAD_CONFIG = 78


def main(argv: list[str]) -> int:
    """0 with a `Survey` on the standard output; 78 with one line on the standard error for bad settings."""
    try:
        config = resolve(CoreConfig, "wkvm-core", argv, os.environ)
        survey = look(config)
    except (BadSettings, Refused) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    print(msgspec.json.encode(survey).decode())
    return 0


def look(config: CoreConfig) -> Survey:
    """Raises Refused(BAD_CONFIG) for a word that names no model, and for dtypes that the device does not serve."""
    import torch  # after the settings: one that is wrong is told at once

    from wkvm_core.daemon.hardware import DEFAULT_DTYPES, find_device
    from wkvm_core.models.open import COUNTING, check_dtypes, sizes_of

    device, refusal, card = "", "", None
    dtype = config.dtype or DEFAULT_DTYPES["cpu"]
    try:
        found = find_device(config.device)
    except Refused as error:
        refusal = str(error)
    else:
        device = str(found)
        dtype = config.dtype or DEFAULT_DTYPES[found.type]
        if config.model != COUNTING:
            check_dtypes(found, dtype, config.state_dtype)
        if found.type == "cuda":
            free, total = torch.cuda.mem_get_info(found)
            card = Card(torch.cuda.get_device_name(found), torch.cuda.get_device_capability(found), total, free)
    slot_bytes, weight_bytes = sizes_of(config.model, dtype, config.state_dtype) or (None, 0)
    return Survey(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        threads=torch.get_num_threads(),
        wanted=config.device,
        device=device,
        refusal=refusal,
        card=card,
        gpu_memory_utilization=config.gpu_memory_utilization,
        state_dtype=config.state_dtype,
        slots=config.slots,
        store=config.store,
        slot_bytes=slot_bytes,
        weight_bytes=weight_bytes,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
