"""From a Generate message to a request: everything that can be checked without the scheduler, on the mail thread."""

from __future__ import annotations

import math
from itertools import count, pairwise

import numpy as np

from wkvm_core.daemon.caller import Caller, Tray
from wkvm_core.daemon.inbox import Submit
from wkvm_core.errors import Refused
from wkvm_core.sched.request import Request
from wkvm_core.sched.stops import StopCompiler
from wkvm_proto.messages import Generate, ModelCard
from wkvm_proto.names import BadHandle, ErrorCode, check_name
from wkvm_proto.sampling import Sampling


class Reception:
    """Checks and numbers requests; compiles their text stops."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._numbers = count(1)
        self._compiler: StopCompiler | None = None

    def bind(self, compiler: StopCompiler) -> None:
        """The vocabulary is known from now on."""
        self._compiler = compiler

    def receive(self, message: Generate, tray: Tray, now: float) -> Submit:
        """The request of a message. Refuses what cannot be run, naming the field."""
        card = self._card
        if not message.tenant:
            raise _refused(ErrorCode.BAD_REQUEST, "a request belongs to a tenant", "tenant")
        self._check_ids(message.prompt, "prompt")
        num_prompt = len(message.prompt) // 4
        if num_prompt == 0:
            raise _refused(ErrorCode.BAD_REQUEST, "the prompt is empty: there is nothing to read", "prompt")
        if num_prompt > card.max_prompt_tokens:
            raise _refused(
                ErrorCode.PROMPT_TOO_LONG,
                f"the prompt has {num_prompt} tokens; the limit is {card.max_prompt_tokens}",
                "prompt",
            )
        self._check_sampling(message.sampling)
        if message.adapter:
            raise _refused(ErrorCode.BAD_REQUEST, f"there is no adapter {message.adapter}", "adapter")
        ends = [junction.end for junction in message.junctions]
        if any(a >= b for a, b in pairwise(ends)) or (ends and ends[-1] > num_prompt):
            raise _refused(ErrorCode.BAD_REQUEST, "junctions do not ascend within the prompt", "junctions")
        if message.save_as:
            try:
                check_name(message.save_as)
            except BadHandle as error:
                raise _refused(ErrorCode.BAD_REQUEST, str(error), "save_as") from None
        assert self._compiler is not None
        caller = Caller(tray, message.request, now, message.n)
        caller.save_as, caller.num_prompt = message.save_as, num_prompt
        request = Request(
            number=next(self._numbers),
            client=caller,
            tenant=message.tenant,
            prompt=message.prompt,
            sampling=message.sampling,
            n=message.n,
            stops=self._compiler.compile(message.stop_texts) if message.stop_texts else None,
            vocabulary=self._compiler.vocabulary if message.stop_texts else None,
            priority=message.priority,
            deadline=now + message.timeout_s if message.timeout_s is not None else None,
            keep=bool(message.save_as),
            arrived=now,
            adapter=message.adapter,
        )
        return Submit(request, caller, message.state, message.save_as)

    def _check_ids(self, column: bytes, param: str) -> None:
        if len(column) % 4:
            raise _refused(ErrorCode.BAD_REQUEST, f"{param} is not a column of u32 ids", param)
        ids = np.frombuffer(column, "<u4")
        if ids.size and int(ids.max()) >= self._card.vocab_size:
            bad = int(ids[int((ids >= self._card.vocab_size).argmax())])
            raise _refused(
                ErrorCode.TOKEN_OUT_OF_RANGE,
                f"{param}: there is no token {bad} in a vocabulary of {self._card.vocab_size}",
                param,
            )

    def _check_sampling(self, sampling: Sampling) -> None:
        for name in sampling.__struct_fields__:
            value = getattr(sampling, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise _refused(ErrorCode.BAD_REQUEST, f"{name} is not a finite number", name)
        if sampling.max_tokens > self._card.max_output_tokens:
            raise _refused(
                ErrorCode.BAD_REQUEST,
                f"max_tokens is {sampling.max_tokens}; the limit is {self._card.max_output_tokens}",
                "max_tokens",
            )
        if sampling.min_tokens > sampling.max_tokens:
            raise _refused(
                ErrorCode.BAD_REQUEST,
                f"min_tokens {sampling.min_tokens} is more than max_tokens {sampling.max_tokens}",
                "min_tokens",
            )
        self._check_ids(sampling.stop_ids, "stop_token_ids")
        self._check_ids(sampling.bias_ids, "logit_bias")
        values = sampling.bias_values
        if np.unique(np.frombuffer(sampling.bias_ids, "<u4")).size * 4 != len(sampling.bias_ids):
            raise _refused(ErrorCode.BAD_REQUEST, "logit_bias names an id twice", "logit_bias")
        if len(values) != len(sampling.bias_ids) or not np.isfinite(np.frombuffer(values, "<f4")).all():
            raise _refused(ErrorCode.BAD_REQUEST, "logit_bias does not give each id one finite number", "logit_bias")


def _refused(code: ErrorCode, message: str, param: str) -> Refused:
    return Refused(code, message, param=param)
