"""Entries and stores for tests."""

import torch

from midstream.codecs import parse_codec
from midstream.store import Entry, Header, TapRows, Writer, open_store
from midstream.store.format.shard_builder import ShardBuilder

HIDDEN = 8
TAPS = (("resid_pre", 0), ("resid_post", 0), ("resid_post", 3))


def header(**fields) -> Header:
    known = {
        "model": "acme/tiny",
        "revision": "abc",
        "hidden_size": HIDDEN,
        "dtype": "bfloat16",
        "codec": "raw",
        "vllm": "0.32.0",
        "midstream": "0.1.0",
    }
    return Header(**(known | fields))


def vectors(seed: int, rows: int, header: Header, tap=None) -> torch.Tensor:
    """[rows, width of the tap] in the header's dtype, the same for the same seed."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, header.width(tap), generator=made).to(header.torch_dtype)


def rows_of(values: torch.Tensor, header: Header, positions=None, tokens=None) -> TapRows:
    count = len(values)
    positions = (
        torch.arange(count) if positions is None else torch.as_tensor(positions, dtype=torch.int64)
    )
    tokens = positions * 10 if tokens is None else torch.as_tensor(tokens, dtype=torch.int64)
    return TapRows(parse_codec(header.codec).encode(values), positions, tokens)


def entry(request="a", *, rows=3, taps=TAPS, head=None, seed=0, positions=None, **fields) -> Entry:
    """A completion whose vectors at tap i are `vectors(seed + i, rows, head, tap)`."""
    head = head or header()
    if positions is None:
        positions = torch.arange(rows)
    positions = torch.as_tensor(positions, dtype=torch.int64)
    tokens = positions * 10 + 1
    return Entry(
        request=request,
        prompt_tokens=fields.pop("prompt_tokens", 2),
        taps={
            tap: rows_of(vectors(seed + i, len(positions), head, tap), head, positions, tokens)
            for i, tap in enumerate(taps)
        },
        **fields,
    )


def shard_bytes(entries, head=None, replaces=()) -> bytes:
    """Build the file of one shard."""
    builder = ShardBuilder(head or header(), replaces)
    for each in entries:
        builder.add(*builder.read(each))
    return b"".join(builder.pieces())


def write(root, entries, head=None, **options) -> None:
    """Puts entries into the store at a path, in one go."""
    with Writer(root, head or header(), **options) as writer:
        for each in entries:
            writer.add(each)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN and all."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.contiguous().view(torch.uint8).equal(right.contiguous().view(torch.uint8))
    )


def ids(root) -> list[tuple[str, int]]:
    """(request, child) of each completion of a store."""
    return sorted((each.request, each.child) for each in open_store(root).requests)
