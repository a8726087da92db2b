"""The text of a codec, and what is refused of it."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream.codecs import Cast, Full8, Raw, Rp8, Topk8, parse_codec
from midstream.errors import UnsupportedError


def test_a_codec_is_read_from_its_text():
    for text, codec, spec in (
        ("raw", Raw(), "raw"),
        ("full8", Full8(), "full8"),
        ("rp8", Rp8(k=512, seed=0), "rp8:k=512,seed=0"),
        ("rp8:k=7", Rp8(k=7), "rp8:k=7,seed=0"),
        ("rp8:seed=18446744073709551615,k=1", Rp8(1, 2**64 - 1), None),
        ("topk8", Topk8(k=64), "topk8:k=64"),
        ("cast", Cast("bfloat16"), "cast:dtype=bfloat16"),
        ("cast:dtype=float8_e4m3fn", Cast("float8_e4m3fn"), None),
        ("topk8:k=1", Topk8(k=1), "topk8:k=1"),
    ):
        assert parse_codec(text) == codec, text
        assert parse_codec(codec) is codec
        assert spec is None or codec.spec == spec
        assert parse_codec(codec.spec) == codec


@given(st.integers(1, 4096), st.integers(0, 2**64 - 1))
def test_every_codec_s_own_text_is_read_as_that_codec(k, seed):
    for codec in (Rp8(k, seed), Topk8(k)):
        assert parse_codec(codec.spec) == codec


def test_what_names_no_codec_is_refused_by_field_and_value():
    refused(
        parse_codec,
        (None, "codec", "expected one of `raw`, `cast:dtype=bfloat16`, .*`topk8:k=64`, got `None`"),
        (8, "codec", "got `int`"),
        ("", "codec", "expected one of `raw`"),
        ("full", "codec", "did you mean `full8`"),
        (" raw", "codec", "expected one of `raw`"),
        ("topk", "codec", "did you mean `topk8`"),
        ("x" * 10**6, "codec", "(?s)^codec: expected one of `raw`.{1,280}$"),
        ("raw:k=1", "codec", "`raw` takes no parameters, got 'k=1'"),
        ("full8:", "codec", "`full8` takes no parameters, got ''"),
        ("rp8:", "codec", "`rp8` takes `k`, `seed`, got ''"),
        ("rp8:sed=1", "codec", r"got 'sed=1' \(did you mean `seed`\?\)"),
        ("topk8:seed=1", "codec", "`topk8` takes `k`, got 'seed=1'"),
        ("rp8:k=1,k=1", "codec.k", "duplicate parameter"),
        ("cast:dtype=int8", "codec.dtype", "one of `bfloat16`, `float16`, `float8_e4m3fn`"),
        ("rp8:k", "codec.k", "expected a decimal number, got ''"),
        ("rp8:k= 1", "codec.k", "expected a decimal number, got ' 1'"),
        ("rp8:k=1_0", "codec.k", "expected a decimal number"),
        ("rp8:k=٣", "codec.k", "expected a decimal number"),
        ("rp8:k=01", "codec.k", "expected a decimal number"),
        ("rp8:k=1.5", "codec.k", "expected a decimal number"),
        ("rp8:k=" + "9" * 10**6, "codec.k", "(?s)^.{1,300}$"),
        ("rp8:k=0", "codec.k", "expected 1 to 16384, got 0"),
        ("rp8:k=16385", "codec.k", "expected 1 to 16384, got 16385"),
        ("rp8:seed=-1", "codec.seed", "expected a decimal number, got '-1'"),
        ("rp8:seed=18446744073709551616", "codec.seed", "got an integer of 65 bits"),
        ("topk8:k=0", "codec.k", "expected 1 to 1048576, got 0"),
    )
    for cls in (Rp8, Topk8):
        refused(
            lambda k, cls=cls: cls(k=k),
            *((k, "expected `int`, got") for k in (True, 1.0, "1", None)),
        )


def test_a_machine_that_is_not_little_endian_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedError, match="codecs require a little-endian"):
        parse_codec("raw")
