"""A machine as a core would find it."""

from __future__ import annotations

from wkvm_proto.survey import Survey

SURVEY = Survey(
    torch="2.11.0",
    cuda="13.0",
    threads=4,
    wanted="auto",
    device="cpu",
    refusal="",
    card=None,
    gpu_memory_utilization=0.9,
    state_dtype="float32",
    slots=None,
    store="",
)
