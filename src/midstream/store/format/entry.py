"""Store entries (the rows of one completion) and shard headers (what all rows share)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from midstream import sites
from midstream.codecs import Codec, parse_codec
from midstream.errors import CodecError, SpecError, StoreError, UnsupportedError
from midstream.sites import Tap
from midstream.validation import is_int, kind, listed, show

DTYPES = ("bfloat16", "float16", "float32")
MAX_TEXT = 1024  # characters of a request's id, a tag, a model's name and the like
MAX_HIDDEN = 1 << 20
MAX_LAYER = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class TapRows:
    """The rows of one completion at one site and layer.

    Attributes:
        data: uint8 [n, row_bytes] on the host, as the store's codec encodes them.
        positions: int64 [n], ascending.
        token_ids: int64 [n]; 0 where the prompt was embeddings.
    """

    data: Tensor
    positions: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The rows and metadata of one completion.

    Attributes:
        request: id of the request, not empty.
        child: index of the completion in its request, from 0.
        tag: label by which rows can be selected and pruned together; may be empty.
        prompt_tokens: number of prompt tokens.
        metadata: any JSON object, for example the prompt's text, the plan and the receipt.
        taps: its rows by (site, layer).
    """

    request: str
    prompt_tokens: int
    taps: Mapping[Tap, TapRows]
    child: int = 0
    tag: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Properties that all rows of a shard share.

    Attributes:
        model: name or path of the model, as passed to the engine.
        revision: revision of the model; empty if none was given.
        hidden_size: width of the residual stream, and of the vectors before encoding.
        widths: the taps whose vectors have another width, each with it, in the order of a forward
            pass; as an argument also a dict, and in any order. A shard's header has those of its
            own taps.
        dtype: dtype of the vectors before encoding: bfloat16, float16 or float32.
        codec: codec spec with every parameter written out: "raw", "rp8:k=512,seed=0".
        vllm: version of vLLM.
        midstream: version of midstream.

    Raises:
        StoreError: a field is malformed, or the codec is unknown.
    """

    model: str
    revision: str
    hidden_size: int
    widths: tuple[tuple[Tap, int], ...] = ()
    dtype: str
    codec: str
    vllm: str
    midstream: str
    _width_of: dict[Tap, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "revision", "vllm", "midstream"):
            check_text(name, getattr(self, name))
        check_number("hidden_size", self.hidden_size, 1, MAX_HIDDEN)
        object.__setattr__(self, "_width_of", _other_widths(self.widths, self.hidden_size))
        object.__setattr__(self, "widths", tuple(self._width_of.items()))
        if self.dtype not in DTYPES:
            got = show(self.dtype) if isinstance(self.dtype, str) else kind(self.dtype)
            raise StoreError(f"dtype: expected one of {listed(DTYPES)}, got {got}")
        spec = self.open_codec().spec
        if spec != self.codec:
            raise StoreError(f"codec: expected the full spec {show(spec)}, got {self.codec!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def width(self, tap: Tap) -> int:
        """Return the width of a tap's vectors before encoding."""
        return self._width_of.get(tap, self.hidden_size)

    def row_bytes(self, tap: Tap) -> int:
        """Return the bytes of one encoded row of a tap.

        Raises:
            StoreError: the codec cannot encode vectors of its width.
        """
        try:
            return _row_bytes(self.codec, self.width(tap), self.torch_dtype)
        except SpecError as error:
            raise StoreError(f"{tap[0]}.{tap[1]}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; `widths`, {"attn_out.1": 12}, only if there are any."""
        json_fields = {
            attribute.name: getattr(self, attribute.name)
            for attribute in fields(self)
            if attribute.init
        }
        json_fields["widths"] = {f"{site}.{layer}": width for (site, layer), width in self.widths}
        return {name: value for name, value in json_fields.items() if name != "widths" or value}

    def open_codec(self) -> Codec:
        """Return the codec of the rows."""
        if not isinstance(self.codec, str):
            raise StoreError(f"codec: expected a spec, `str`, got {kind(self.codec)}")
        try:
            codec = parse_codec(self.codec)
            codec.row_bytes(self.hidden_size, self.torch_dtype)
        except (SpecError, CodecError, UnsupportedError) as error:
            raise StoreError(str(error)) from None
        return codec


@functools.lru_cache(maxsize=1024)
def _row_bytes(codec: str, width: int, dtype: torch.dtype) -> int:
    return parse_codec(codec).row_bytes(width, dtype)


def _other_widths(widths: Any, hidden_size: int) -> dict[Tap, int]:
    """Return the taps of another width than `hidden_size`, in the order of a forward pass."""
    try:
        by_tap: dict[Any, object] = dict(widths)
    except (TypeError, ValueError):
        raise StoreError(f"widths: expected pairs of tap and width, got {kind(widths)}") from None
    checked: dict[Tap, int] = {}
    for tap, width in by_tap.items():
        if not isinstance(tap, tuple) or len(tap) != 2 or tap[0] not in sites.NAMES:
            raise StoreError(
                f"widths: expected (site, layer) of a site of {listed(sites.NAMES)}, got "
                f"{show(repr(tap))}"
            )
        check_number("widths: layer", tap[1], 0, MAX_LAYER)
        checked[tap] = check_number(f"widths: {tap[0]}.{tap[1]}", width, 1, MAX_HIDDEN)
    return {
        tap: checked[tap] for tap in sorted(checked, key=sites.order) if checked[tap] != hidden_size
    }


def check_text(name: str, value: object, *, least: int = 0) -> str:
    """Return `value` if it is a string of `least` to MAX_TEXT characters that UTF-8 can encode."""
    if not isinstance(value, str):
        raise StoreError(f"{name}: expected `str`, got {kind(value)}")
    if not least <= len(value) <= MAX_TEXT:
        raise StoreError(f"{name}: expected {least} to {MAX_TEXT} characters, got {len(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise StoreError(f"{name}: {show(value)} contains a lone surrogate") from None
    return value


def check_number(name: str, value: object, least: int, most: int) -> int:
    """Return `value` as an int if it is an integer in [least, most]."""
    # The common case first: `is_int` takes ten times as long.
    if type(value) is not int and not is_int(value):
        raise StoreError(f"{name}: expected `int`, got {kind(value)}")
    number = int(value)
    if not least <= number <= most:
        raise StoreError(f"{name}: expected {least} to {most}, got {show(number)}")
    return number
