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
    """Rows of a request that the front end has from earlier requests.

    Attributes:
        resets: number of resets of the prefix cache up to which they are valid.
        first_read: first position whose row must be computed all the same; None: there is none.
    """

    resets: int
    first_read: int | None


class RequestPayload(ProtocolMessage, frozen=True, array_like=True):
    """What a validated request has under `extra_args["midstream"]`.

    Attributes:
        uid: midstream's request id. vLLM's own id differs between its processes and completions.
        plan: the resolved plan; see `plan.resolve.wire`.
        vectors: what the workers must do to have the vectors that the plan names; None: nothing.
            The engine core takes it out, see `runtime.core.vector_updates`.
        kept: rows that need not be computed; None: all rows that `keys` names must be.
        acts: its probes that end it or switch its edits. With any, the workers report its scores in
            each step.
        control: its controller in the engine core; None: it has none. The scores are reported as
            with `acts`.
        split: columns of reported scores of which tensor-parallel ranks have parts, each with the
            number of parts; see `runtime.worker.split_scores`.
        mm_prefix: whether its model is one whose image tokens attend to each other both ways; see
            `runtime.core.image_ranges`.
    """

    uid: str
    plan: bytes
    keys: CacheKeys
    vectors: VectorUpdate | None = None
    kept: ReusableRows | None = None
    acts: tuple[ActingProbe, ...] = ()
    control: Control | None = None
    split: tuple[SplitScore, ...] = ()
    mm_prefix: bool = False

    @property
    def reports(self) -> bool:
        """Whether the workers report its scores in each step."""
        return bool(self.acts) or self.control is not None

    def first_read(self, resets: int) -> int | None:
        """Return the first position whose row must be computed; None: there is none.

        Args:
            resets: number of resets of the engine's prefix cache.
        """
        kept = self.kept
        return self.keys.first_read if kept is None or kept.resets != resets else kept.first_read


def payload_of(sampling_params: Any) -> RequestPayload | None:
    """Return the payload of a request; None if it asks for nothing.

    vLLM's msgpack turns a payload into plain values. The first call in a process reads them and
    puts the payload back into `extra_args`, so that later calls, and vLLM's pickles for workers,
    have it as it is.
    """
    extra_args: dict[str, Any] | None = getattr(sampling_params, "extra_args", None)
    if not extra_args or extra_args.get(KEY) is None:
        return None
    value = extra_args[KEY]
    if isinstance(value, RequestPayload):
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
    """Return the uid of a request's payload; None if it asks for nothing. See `payload_of`."""
    payload = payload_of(sampling_params)
    return None if payload is None else payload.uid


def _convert(value: object) -> RequestPayload:
    # Without `builtin_types` a str would be taken for base64.
    return msgspec.convert(value, RequestPayload, builtin_types=(bytes,))
