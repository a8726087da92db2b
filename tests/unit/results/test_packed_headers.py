"""Headers of packed rows, which files of one form share."""

import json
import struct
from types import SimpleNamespace

import torch

from midstream.codecs import parse_codec
from midstream.results.activations import Activations
from midstream.results.arrays import Heads
from midstream.results.encoded_rows import Rows
from midstream.results.gathered_rows import GatheredRows, RowGroup
from midstream.results.serialization import pack, unpack

TAPS = (("z", 0), ("z", 1))


def file_of(
    taps=TAPS, spec="raw", width=8, hidden=8, dtype=torch.float32, rows=2, layers=None, heads=None,
    shown=None,
):  # fmt: skip
    """A file of rows of some taps that were captured together; the header alone tells its form."""
    codec = parse_codec(spec)
    encoded_rows = codec.encode(torch.ones(rows * len(taps), width, dtype=dtype))
    chunk = encoded_rows.view(torch.uint8).view(rows, len(taps), -1)
    block = SimpleNamespace(taps=taps, chunks=[chunk])
    nothing = Rows(codec, width, dtype, (), ())
    group = RowGroup(tuple(taps), torch.arange(rows), [block], None, nothing)
    gathered = GatheredRows(taps, [group])
    by_tap = {tap: Heads(heads, shown) for tap in taps if heads}
    given_ = Activations(gathered, gathered.positions(), torch.arange(9), layers, by_tap)
    return pack(given_, hidden, dtype)


ALIKE_BUT_FOR_ONE_THING = {
    "nothing": {},
    "the codec": {"spec": "full8"},
    "a parameter of the codec": {"spec": "topk8:k=3"},
    "that parameter": {"spec": "topk8:k=4"},
    "their width": {"width": 4},
    "the width of the stream": {"hidden": 4},
    "their dtype": {"dtype": torch.bfloat16},
    "another dtype of as many bytes": {"dtype": torch.float16},
    "the number of rows": {"rows": 3},
    "the number of layers": {"layers": 4},
    "their heads": {"heads": 4},
    "the number of heads": {"heads": 2},
    "the heads that are shown": {"heads": 4, "shown": (0,)},
    "the order of taps": {"taps": (("z", 1), ("z", 0))},
    "a layer": {"taps": (("z", 0), ("z", 2))},
    "a site": {"taps": (("z", 0), ("q", 1))},
    "the number of taps": {"taps": (("z", 0),)},
}


def test_files_that_differ_in_one_thing_have_each_their_own_header():
    for _ in range(2):
        headers = set()
        for what, given in ALIKE_BUT_FOR_ONE_THING.items():
            data = file_of(**given)
            (size,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + size])
            metadata = header.pop("__metadata__")
            taps = given.get("taps", TAPS)
            assert metadata["codec"] == parse_codec(given.get("spec", "raw")).spec, what
            assert metadata["hidden"] == str(given.get("hidden", 8)), what
            assert metadata["dtype"] == str(given.get("dtype", torch.float32))[6:], what
            assert metadata.get("num_layers", "None") == str(given.get("layers")), what
            assert list(header)[-len(taps) :] == [f"{site}.{layer}" for site, layer in taps], what
            assert set(unpack(data).counts().items()) == {
                (tap, given.get("rows", 2)) for tap in taps
            }
            headers.add(data[: 8 + size])
        assert len(headers) == len(ALIKE_BUT_FOR_ONE_THING)
