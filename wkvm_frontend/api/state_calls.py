"""What /v1/states asks of a core."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from wkvm_frontend.api.chat import OFFLOAD_BYTES, TENANT
from wkvm_frontend.api.completions import prompts_of
from wkvm_frontend.api.generation import Generation
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import bad_request, from_core, internal_error, unavailable
from wkvm_frontend.wire.link import CoreGone, FrameTooLarge
from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import (
    Distances,
    Failed,
    Finished,
    Generate,
    ShowState,
    StateCall,
    StateRecord,
    States,
)
from wkvm_proto.sampling import Sampling


async def read(
    service: Service,
    receive: Receive,
    model: str | None,
    prompt: str | list[int],
    size: int,
    *,
    state: str,
    save_as: str,
) -> StateRecord:
    """Lets a state (empty: the zero state) read a prompt of a body of `size` bytes, and keeps what comes of it. Raises
    ApiError, ClientGone."""
    settings = service.settings
    link = await service.fleet.reach(model, settings.core_wait_s)
    served = link.model
    assert served is not None, "a ready core has a model"
    if size > OFFLOAD_BYTES:
        (ids,) = await asyncio.to_thread(prompts_of, [prompt], served, continued=bool(state))
    else:
        (ids,) = prompts_of([prompt], served, continued=bool(state))
    generate = Generate(
        request=0,
        tenant=TENANT,
        prompt=pack_u32(ids),
        sampling=Sampling(max_tokens=0),
        timeout_s=settings.request_timeout_s,
        state=state,
        save_as=save_as,
    )
    generation = Generation(link, service.meter, None)
    try:
        await generation.start([generate], receive, settings.accept_timeout_s)
        saved = ""
        while not saved:
            for _, item in await generation.take():
                if isinstance(item, Failed):
                    raise from_core(item)
                if isinstance(item, Finished):
                    if not item.saved_as:
                        raise internal_error()
                    saved = item.saved_as
    finally:
        await generation.end()
    return (await ask(service, model, ShowState(0, TENANT, saved))).records[0]


async def ask(service: Service, model: str | None, call: StateCall) -> States:
    """The core's answer, records. Raises ApiError."""
    answer = await answer_of(service, model, call)
    if not isinstance(answer, States):
        raise internal_error()
    return answer


async def answer_of(service: Service, model: str | None, call: StateCall) -> States | Distances:
    """The core's answer. Raises ApiError."""
    settings = service.settings
    link = await service.fleet.reach(model, settings.core_wait_s)
    try:
        answer = await link.ask(call, settings.accept_timeout_s)
    except (CoreGone, TimeoutError):
        raise unavailable("The engine is not available right now. Please try again in a few seconds.") from None
    except FrameTooLarge:
        raise bad_request("names: too many bytes.", "names") from None
    if isinstance(answer, Failed):
        raise from_core(answer)
    return answer
