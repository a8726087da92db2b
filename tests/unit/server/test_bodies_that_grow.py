"""Short bodies that become long: compressed, JSON as text in JSON, parts that refer to others."""

import gzip
import json
import struct

import numpy as np
import pytest
from support.others_words import encoded
from support.serving_fake import serving

from midstream.compat import packed_arrays, vllm_fork, vllm_lens
from midstream.compat.packed_arrays import MAX_NUMBERS
from midstream.errors import SpecError
from midstream.plan.vectors.vector import MAX_SIZE, Vector
from midstream.server.body_values import MAX_VALUES, is_long
from midstream.server.request_field import take_field
from midstream.server.routes.uploads import read_file
from midstream.steering.gguf import MAX_METADATA

pytestmark = pytest.mark.anyio


def compressed(count, size):
    """Vectors whose arrays say that they are compressed, of so many numbers each."""
    array = {"data": "eg==", "shape": [1, size], "compression": "zstd"}
    return [{"activations": array, "layer_indices": [n]} for n in range(count)]


@pytest.mark.parametrize("place", ["body", "vllm_xargs"])
async def test_compressed_arrays_of_a_body_have_a_budget_together(monkeypatch, place):
    read = []

    def decompressed(_data, size):
        read.append(size)
        return np.ones(size // 4, np.float32).tobytes()

    monkeypatch.setattr(packed_arrays, "_decompressed", decompressed)
    name = "apply_steering_vectors"
    most = MAX_NUMBERS // MAX_SIZE
    for count, size in ((most, 3), (most + 1, MAX_SIZE)):
        given = compressed(count, size)
        field = {name: given} if place == "body" else {"vllm_xargs": {name: json.dumps(given)}}
        body = {"prompt": "abc", **field}
        assert len(json.dumps(body)) < 3000
        async with serving() as (site, client):
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, len(site.engine.calls)) == (
                (200, 1) if size == 3 else (400, 0)
            )
            problem = answer.text
    assert f"{(most + 1) * MAX_SIZE} numbers in compressed arrays" in problem
    assert f"the budget of one request is {MAX_NUMBERS}" in problem
    assert read == [12] * most, "counted before one is decompressed"


def test_a_malformed_shape_takes_nothing_from_the_budget():
    bad = {"activations": {"data": "eg==", "shape": [-1, MAX_NUMBERS], "compression": "zstd"}}
    with pytest.raises(SpecError, match="numbers in compressed arrays"):
        vllm_lens.read_plan({"apply_steering_vectors": [bad, *compressed(17, MAX_SIZE)]})


def test_arrays_that_are_not_compressed_are_as_long_as_the_body():
    own = {"data": encoded(np.ones((1, 8))), "shape": [1, 8]}
    given = [{"activations": own, "layer_indices": [n]} for n in range(500)]
    assert len(vllm_lens.read_plan({"apply_steering_vectors": given}).edits) == 500


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"vllm_xargs": {"midstream": "VALUES"}}, "vllm_xargs.midstream"),
        ({"vllm_xargs": {"apply_steering_vectors": "VALUES"}},
         "vllm_xargs.apply_steering_vectors"),
        ({"apply_steering_vectors": "VALUES"}, "apply_steering_vectors"),
    ],
)  # fmt: skip
def test_json_as_text_has_no_more_values_than_a_body(body, path):
    text = "[" + "0," * (MAX_VALUES + 1) + "0]"
    body = json.loads(json.dumps(body).replace('"VALUES"', json.dumps(text)))
    with pytest.raises(SpecError, match=f"more than {MAX_VALUES} values") as caught:
        take_field(body)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "body",
    [
        rb'{"apply_steering_vectors": [{"activations": {"compression": "zst\u0064"}}]}',
        rb'{"vllm_xargs": {"apply_steering_vectors": "[{\"compression\": \"zstd\"}]"}}',
        '{"apply_steering_vectors": [{"compression": "zstd"}]}'.encode("utf-16"),
        rb'{"vllm_xargs": {"midstream": "[0\u002c0]"}}',
    ],
)
def test_a_body_that_becomes_long_is_parsed_in_a_thread_however_it_is_written(body):
    assert is_long(body)


def test_patches_that_take_one_row_read_it_once(monkeypatch):
    read = []
    check = Vector.__post_init__
    monkeypatch.setattr(Vector, "__post_init__", lambda self: read.append(1) or check(self))
    rows = {"dtype": "float32", "shape": [2, 4], "data": encoded([[1, 2, 3, 4], [5, 6, 7, 8]])}
    patch = [
        {"layer": 1, "hook": "post_block", "dest_position": n, "source_inline": n % 2}
        for n in range(1000)
    ]
    edits = vllm_fork.read_edits({"patch": patch, "patch_vectors": rows})
    assert len(read) == 2
    assert [edit.rows[0].numpy()[0] for edit in edits[:3]] == [1, 5, 1]


def gguf(tensors, metadata=b"", count=0):
    """A control vector whose tensors, (name, numbers, offset), lie in 64 bytes of data."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + count)
    head += text("general.architecture") + struct.pack("<I", 8) + text("controlvector") + metadata
    for name, numbers, offset in tensors:
        head += text(name) + struct.pack("<IQIQ", 1, numbers, 0, offset)
    head += bytes(-len(head) % 32)
    return head + np.arange(1, 17, dtype="<f4").tobytes()


def test_tensors_of_an_uploaded_file_share_no_bytes():
    assert len(read_file(gguf([("direction.1", 8, 0), ("direction.2", 8, 32)]))) == 2
    with pytest.raises(SpecError, match="tensors have 4096 bytes, and the file has"):
        read_file(gguf([(f"direction.{n}", 16, 0) for n in range(1, 65)]))


def test_metadata_of_an_uploaded_file_have_a_budget():
    def with_array(size):
        kind_and_count = struct.pack("<IIQ", 9, 0, size)
        return struct.pack("<Q", 1) + b"a" + kind_and_count + bytes(size)

    read_file(gguf([("direction.1", 8, 0)], with_array(1000), 1))
    with pytest.raises(SpecError, match=f"more than {MAX_METADATA} numbers of metadata"):
        read_file(gguf([("direction.1", 8, 0)], with_array(MAX_METADATA + 1), 1))


async def test_a_body_in_gzip_is_not_unpacked():
    body = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}
    packed = gzip.compress(json.dumps(body).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with serving() as (site, client):
        for path in ("/v1/completions", "/v1/midstream/fit", "/v1/midstream/sweep"):
            answer = await client.post(path, content=packed, headers=headers)
            assert answer.status_code == 400
        assert site.engine.calls == []
