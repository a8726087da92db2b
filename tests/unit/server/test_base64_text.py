"""Rows in JSON are what they would be as one text: each byte, in every part of a response."""

import base64
import itertools

import msgspec
import pytest
from support.serving_fake import rows, serving

from midstream.results.serialization import pack
from midstream.server import results_json
from midstream.server.base64_text import Base64Text, dump

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
INLINE = {"capture": {"layers": [1, 2]}, "activations": "inline"}


def text_of(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_parts_of_any_length_are_one_text(kind):
    for sizes in itertools.product(range(5), repeat=4):
        data = bytes(range(sum(sizes)))
        ends = itertools.accumulate(sizes)
        parts = [kind(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        assert b"".join(dump(Base64Text(parts))) == msgspec.json.encode(text_of(data))


def test_each_text_is_in_its_place_whatever_is_around_it():
    def made(text):
        return {"a": [text(b"first"), '\0"\\', text(b"")], "\0": {"b": text(b"second")}, "c": None}

    expected = msgspec.json.encode(made(text_of))
    assert b"".join(dump(made(lambda data: Base64Text([data])))) == expected


def test_what_is_no_json_is_an_error():
    with pytest.raises(TypeError, match="object"):
        dump({"a": object()})


@pytest.mark.parametrize("loop_bytes", [0, 1 << 20])
async def test_a_whole_body_is_vllms_with_the_results_as_one_text(monkeypatch, loop_bytes):
    monkeypatch.setattr(results_json, "_LOOP_BYTES", loop_bytes)
    async with serving() as (site, client):
        answer = await client.post(PATH, json={"prompt": "abc", "midstream": INLINE})
        plain = await client.post(PATH, json={"prompt": "abc"})
        vectors = site.server.answers._vectors
    told = answer.json()["midstream"]
    assert told["activations"]["base64"] == text_of(pack(rows((1, 2), 5), *vectors))
    end = b',"midstream":%b}' % msgspec.json.encode(told)
    assert answer.content == plain.content[:-1] + end
    assert answer.headers["content-length"] == str(len(answer.content))
