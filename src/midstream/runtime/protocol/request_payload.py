"""What a request brings from the front end to the engine core and the workers, in `extra_args`."""

from __future__ import annotations

from typing import Any

import msgspec

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.runtime.protocol.acting_probes import ActingProbe
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.codec import ProtocolMessage
from midstream.runtime.protocol.control import Control
from midstream.runtime.protocol.rank_parts import SplitScore
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.validation import read_message


class ReusableRows(ProtocolMessage, frozen=True, array_like=True):
    """Rows of a request that the front end has from earlier requests."""

    resets: int  # of the prefix cache, up to which they are valid
    first_read: int | None  # first position whose row must be computed all the same


class RequestPayload(ProtocolMessage, frozen=True, array_like=True):
    """What a validated request has under `extra_args["midstream"]`."""

    uid: str  # midstream's request id. vLLM's own id differs between its processes and completions
    plan: bytes  # the resolved plan; see `plan.resolve.wire`
    keys: CacheKeys
    # What the workers must do first to have those that the plan names; the engine core takes it
    # out, see `runtime.core.vector_updates`.
    vectors: VectorUpdate | None = None
    kept: ReusableRows | None = None  # not to be computed; None: as `keys` says
    # Probes that end it or switch its edits. With any, or with a controller in the engine core, the
    # workers report its scores in each step.
    acts: tuple[ActingProbe, ...] = ()
    control: Control | None = None
    # Columns of reported scores of which ranks have parts, with the number of parts; see
    # `runtime.worker.split_scores`.
    split: tuple[SplitScore, ...] = ()
    # Image tokens of its model attend to each other both ways; see `runtime.core.image_ranges`.
    mm_prefix: bool = False

    @property
    def reports(self) -> bool:
        return bool(self.acts) or self.control is not None

    def first_read(self, resets: int) -> int | None:
        """Return the first position whose row must be computed, given the prefix cache's resets."""
        kept = self.kept
        return self.keys.first_read if kept is None or kept.resets != resets else kept.first_read


def payload_of(sampling_params: Any) -> RequestPayload | None:
    """Return a request's payload, or None; a process's first call converts vLLM's plain values."""
    extra_args: dict[str, Any] | None = getattr(sampling_params, "extra_args", None)
    value = extra_args.get(KEY) if extra_args else None
    if extra_args is None or value is None or isinstance(value, RequestPayload):
        return value
    try:
        payload = read_message(_convert, value)
    except SpecError:
        raise SpecError(
            f"extra_args[{KEY!r}]",
            "reached a worker without having been checked: the front end that took the request in "
            "does not have midstream loaded",
        ) from None
    extra_args[KEY] = payload
    return payload


def uid_of(sampling_params: Any) -> str | None:
    payload = payload_of(sampling_params)
    return None if payload is None else payload.uid


def _convert(value: object) -> RequestPayload:
    # Without `builtin_types` a str would be taken for base64.
    return msgspec.convert(value, RequestPayload, builtin_types=(bytes,))
