"""A shard is what `docs/store-format.md` says, byte by byte, by a second reading of that page."""

import hashlib
import json
import struct
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from unit.store.making import TAPS, entry, header, rows_of, same, shard_bytes, vectors, write

from midstream import open_store
from midstream.store import Entry
from midstream.store.backends.base import is_shard_name
from midstream.store.writer import new_name

GOLDEN = "f4a31a2ddb4be20a46349f7b2e2efd983ceb00a480e9546dc5daa55f64457418"


def golden():
    """A shard of two requests and two groups, whose bytes are known."""
    head = header(hidden_size=2, dtype="float16")
    values = torch.arange(12, dtype=torch.float16).view(6, 2)
    entries = (
        Entry(
            request="a",
            prompt_tokens=2,
            tag="t",
            metadata={"é": 1},
            taps={
                ("resid_post", 1): rows_of(values[:3], head, [0, 1, 3], [7, 8, 9]),
                ("resid_pre", 1): rows_of(values[3:], head, [0, 1, 3], [7, 8, 9]),
            },
        ),
        Entry(
            request="b",
            child=3,
            prompt_tokens=0,
            taps={("mlp_out", 0): rows_of(values[1:2], head, [5], [0])},
        ),
    )
    return shard_bytes(entries, head, ["old-1.safetensors", "old-2.safetensors"])


def test_the_bytes_of_a_shard_are_those_of_the_page_and_never_change():
    about = {
        "format": "midstream.store", "version": "1", "checksum": "crc32:65536",
        "replaces": "old-1.safetensors old-2.safetensors", "model": "acme/tiny",
        "revision": "abc", "hidden_size": "2", "dtype": "float16", "codec": "raw",
        "vllm": "0.32.0", "midstream": "0.1.0",
    }  # fmt: skip
    first = '{"id":"a","child":0,"tag":"t","prompt_tokens":2,"rows":[[0,3]],"metadata":9}\n'
    second = '{"id":"b","child":3,"tag":"","prompt_tokens":0,"rows":[[1,1]],"metadata":3}\n'
    lines = (first + second).encode()
    metadata = '{"é":1}\n'.encode() + b"{}\n"
    assert len(metadata) == 12
    tensors = [
        ("g0.position", "I64", [3], struct.pack("<3q", 0, 1, 3)),
        ("g1.position", "I64", [1], struct.pack("<q", 5)),
        ("g0.token_id", "I64", [3], struct.pack("<3q", 7, 8, 9)),
        ("g1.token_id", "I64", [1], struct.pack("<q", 0)),
        ("g0.request", "I32", [3], struct.pack("<3i", 0, 0, 0)),
        ("g1.request", "I32", [1], struct.pack("<i", 1)),
        ("g0.resid_pre.1", "U8", [3, 4], struct.pack("<6e", *range(6, 12))),
        ("g0.resid_post.1", "U8", [3, 4], struct.pack("<6e", *range(6))),
        ("g1.mlp_out.0", "U8", [1, 4], struct.pack("<2e", 2, 3)),
        ("requests", "U8", [len(lines)], lines),
    ]
    size = sum(len(data) for *_, data in tensors) + len(metadata)
    metadata += b" " * (-size % 64)
    tensors.append(("metadata", "U8", [len(metadata)], metadata))
    data = b"".join(part for *_, part in tensors)
    assert len(data) % 64 == 0
    described = {"__metadata__": about}
    offset = 0
    for name, dtype, shape, part in tensors:
        described[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(part)],
        }
        offset += len(part)
    described["checksums"] = {"dtype": "U32", "shape": [3], "data_offsets": [offset, offset + 12]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)
    head = struct.pack("<Q", len(text)) + text
    words = struct.pack("<2I", zlib.crc32(head), zlib.crc32(data))
    assert golden() == head + data + words + struct.pack("<I", zlib.crc32(words))
    digest = hashlib.sha256(golden()).hexdigest()
    assert digest == GOLDEN, "shards that are out there would not be read any more"


def test_a_block_ends_at_64_kib_and_the_last_where_the_data_ends(tmp_path):
    head = header(hidden_size=4096)
    write(tmp_path, [entry("a", rows=20, head=head), entry("b", rows=3, head=head)], head)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    described = json.loads(data[8:start])
    end = start + described["checksums"]["data_offsets"][0]
    blocks = [data[at : min(at + 65536, end)] for at in range(start, end, 65536)]
    assert len(blocks) > 8
    words = [zlib.crc32(data[:start]), *map(zlib.crc32, blocks)]
    packed = struct.pack(f"<{len(words)}I", *words)
    assert data[end:] == packed + struct.pack("<I", zlib.crc32(packed))


def test_any_reader_of_safetensors_reads_a_shard(tmp_path):
    write(tmp_path, [entry("a"), entry("b", rows=4, seed=9)])
    (path,) = tmp_path.iterdir()
    tensors = load_file(path)
    rows = tensors["g0.resid_post.0"].view(torch.bfloat16)
    assert same(rows[tensors["g0.request"] == 1], vectors(10, 4, header()))
    lines = bytes(tensors["requests"].numpy()).decode().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]
    assert bytes(tensors["metadata"].numpy()).split(b"\n")[:2] == [b"{}", b"{}"]
    with safe_open(path, "pt") as file:
        assert file.metadata()["model"] == "acme/tiny"


@pytest.mark.parametrize("requests", range(1, 9))
def test_every_tensor_is_aligned_to_its_elements(tmp_path, requests):
    write(tmp_path, [entry("x" * i, rows=i) for i in range(1, requests + 1)])
    (shard,) = open_store(tmp_path).shards
    for name, place in shard.layout.places().items():
        width = {"I64": 8, "I32": 4, "U32": 4, "U8": 2 if name.startswith("g") else 1}[place.dtype]
        assert (shard.head_bytes + place.start) % width == 0, name
    assert shard.column(0, "position").flags.aligned
    assert shard.rows(0, TAPS[0], 0, 1).ctypes.data % 2 == 0


def test_names_are_new_each_time_and_sort_by_time():
    names = [new_name() for _ in range(100)]
    assert len(set(names)) == 100
    times = [name[:22] for name in names]
    assert times == sorted(times)
    assert all(map(is_shard_name, names))
    others = ["", ".safetensors", ".a.safetensors", "a.safetensors.tmp", "a b.safetensors", "a.bin"]
    others += ["../a.safetensors", "a\n.safetensors", "a" * 201 + ".safetensors", "a.safetensors\n"]
    assert not any(map(is_shard_name, others))
