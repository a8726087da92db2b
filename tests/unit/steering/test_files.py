"""Files of vectors, and files that pretend to be some."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.gguf_file import gguf_bytes, text

from midstream.errors import SpecError
from midstream.plan import Vector
from midstream.plan.vectors.matrix import matrix_of
from midstream.steering import files
from midstream.steering.files import read_file, read_json_file
from midstream.steering.parse import read_placed

ROWS = {"15": [1.0, 2.5], "pre_attn:0": [-3.0, 0.5]}
WANTED = {
    ("resid_post", 15): Vector.parse([1.0, 2.5]),
    ("resid_pre", 0): Vector.parse([-3.0, 0.5]),
}


def found(path):
    return {(one.site, one.layer): one.vector for one in read_file(path)}


def control_vector(
    directions, *, kind=0, architecture: bytes | None = b"controlvector", dtype="<f4"
) -> bytes:
    metadata = [(b"controlvector.model_hint", 8, text(b"llama"))]
    if architecture is not None:
        metadata.insert(0, (b"general.architecture", 8, text(architecture)))
    metadata.append((b"controlvector.layer_count", 5, struct.pack("<i", len(directions))))
    return gguf_bytes(
        metadata,
        [
            (name, np.shape(row), kind, np.asarray(row, dtype).tobytes())
            for name, row in directions.items()
        ],
    )


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_safetensors_of_every_float_type(tmp_path, dtype):
    path = tmp_path / "v.safetensors"
    save_file({key: torch.tensor(row, dtype=dtype) for key, row in ROWS.items()}, path)
    assert found(path) == WANTED
    assert found(str(path)) == WANTED


def test_safetensors_of_matrices_and_none_that_is_not_square(tmp_path):
    square = torch.tensor([[1.0, 2.5], [-3.0, 0.5]])
    save_file({"15": square.bfloat16(), "16": square[0].contiguous()}, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors") == {
        ("resid_post", 15): matrix_of(square),
        ("resid_post", 16): Vector.parse(square[0]),
    }
    save_file({"vector": square}, tmp_path / "one.safetensors")
    assert read_file(tmp_path / "one.safetensors") == matrix_of(square)
    save_file({"15": torch.zeros(2, 3)}, tmp_path / "bad.safetensors")
    with pytest.raises(SpecError, match=r"tensor '15': expected one dimension, got shape \[2, 3\]"):
        read_file(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_every_float_type(tmp_path, dtype, save):
    path = tmp_path / "v.npz"
    save(path, **{key: np.asarray(row, dtype) for key, row in ROWS.items()})
    assert found(path) == WANTED


@pytest.mark.parametrize(("kind", "dtype"), [(0, "<f4"), (1, "<f2")])
def test_a_control_vectors_direction_n_is_resid_post_of_layer_n(tmp_path, kind, dtype):
    path = tmp_path / "happy.gguf"
    given = {b"direction.1": [1.0, 2.5], b"direction.15": [-3.0, 0.5]}
    path.write_bytes(control_vector(given, kind=kind, dtype=dtype))
    assert found(path) == {
        ("resid_post", 1): Vector.parse([1.0, 2.5]),
        ("resid_post", 15): Vector.parse([-3.0, 0.5]),
    }


def _written(folder, suffix, rows):
    """Write vectors by key to a file of one format; return its path."""
    path = folder / f"v{suffix}"
    if suffix == ".gguf":
        path.write_bytes(control_vector({key.encode(): row for key, row in rows.items()}))
    elif suffix == ".npz":
        np.savez(path, **{key: np.asarray(row, np.float32) for key, row in rows.items()})
    else:
        save_file({key: torch.tensor(row) for key, row in rows.items()}, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".gguf"])
@pytest.mark.parametrize("key", ["direction.15", "vector"])
def test_one_row_is_the_vector_that_it_is_by_value(tmp_path, suffix, key):
    if suffix == ".gguf" and key == "vector":
        pytest.skip("llama.cpp's files have directions of layers alone")
    row = [[1.0, 2.5, -3.0]]
    path = _written(tmp_path, suffix, {key: row})
    expected = Vector.parse(torch.tensor(row))
    read = read_file(path)
    assert (read if key == "vector" else read[0].vector) == expected == Vector.parse(row[0])


NAMES = {
    "blocks.15.hook_resid_post": ("resid_post", 15),
    "blocks.0.attn.hook_z": ("z", 0),
    "model.layers.3.mlp.output": ("mlp_out", 3),
    "model.layers.7": ("resid_post", 7),
    "transformer.h[2].output[0]": ("resid_post", 2),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_keys_are_any_name_of_a_site_and_a_layer(tmp_path, suffix):
    rows = {key: [float(nth), 1.0] for nth, key in enumerate(NAMES)}
    path = _written(tmp_path, suffix, rows)
    assert found(path) == {NAMES[key]: Vector.parse(row) for key, row in rows.items()}
    by_value = {(one.site, one.layer): one.vector for one in read_placed(rows)}
    assert by_value == found(path)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("hook_resid_post", "names no layer"),
        ("blocks.1.hook_scale", "is not a tap"),
        ("ln_final.hook_out", "has no layer"),
        ("model.norm", "has no layer"),
    ],
)
def test_a_name_without_a_site_or_a_layer_is_refused_in_a_file(tmp_path, key, problem):
    with pytest.raises(SpecError, match=problem):
        read_file(_written(tmp_path, ".npz", {key: [1.0, 2.0]}))


def test_two_names_of_one_tap_are_refused(tmp_path):
    rows = {"15": [1.0], "blocks.15.hook_resid_post": [2.0]}
    with pytest.raises(SpecError, match="a second vector for resid_post of layer 15"):
        read_file(_written(tmp_path, ".npz", rows))


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "v.json"
    path.write_text('{"resid_post": {"15": [1.0, 2.5]}}', encoding="utf-8-sig")
    assert read_json_file(path) == {"resid_post": {"15": [1.0, 2.5]}}


def test_a_file_with_only_the_key_vector_is_for_no_tap(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, vector=np.asarray([1.0, 2.0]))
    assert read_file(path) == Vector.parse([1.0, 2.0])


# ---------------------------------------------------------------- what is not


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".pkl", ".PT", ".ckpt", ".joblib"])
def test_pickles_are_refused_by_name_and_not_opened(tmp_path, ending):
    with pytest.raises(SpecError, match=r"hold pickles, which can run code.*safetensors"):
        read_file(tmp_path / f"not there{ending}")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("v.yaml", r"expected \.safetensors, \.npz, \.gguf or \.json, got the suffix '\.yaml'"),
        ("v", "a name without a suffix"),
        ("v.npy", "names no layer"),
        ("v.npz", "No such file"),
        ("v\0.npz", "invalid file name"),
    ],
)
def test_other_files_are_refused_with_those_that_are_read(tmp_path, name, problem):
    with pytest.raises(SpecError, match=problem):
        read_file(tmp_path / name)


def test_a_folder_and_a_pipe_are_no_files(tmp_path):
    (tmp_path / "a.npz").mkdir()
    os.mkfifo(tmp_path / "b.npz")
    for name in ("a.npz", "b.npz"):
        with pytest.raises(SpecError, match="not a regular file"):
            read_file(tmp_path / name)


@pytest.mark.parametrize("ending", ["safetensors", "npz", "gguf"])
def test_too_large_a_file_is_refused_before_it_is_read(tmp_path, ending):
    path = tmp_path / f"v.{ending}"
    most = files.MAX_MATRIX_BYTES if ending == "safetensors" else files.MAX_FILE_BYTES
    with path.open("wb") as file:
        file.truncate(most + 1)
    with pytest.raises(SpecError, match=f"at most {most}"):
        read_file(path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_an_npz_with_a_pickle_in_it_runs_nothing(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, **{"15": np.array([Bomb()], object)})
    with pytest.raises(SpecError, match="tensor '15': expected an array of real numbers"):
        read_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("15.npy", pickle.dumps(Bomb()))
    with pytest.raises(SpecError, match="tensor '15': expected an array in numpy's format"):
        read_file(path)


def npy(header: str, data: bytes = b"") -> bytes:
    body = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + data


NPY = {
    "a shape that is not there": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000,), }", bytes(8)),
        "expected 4000 bytes, got 8",
    ),
    "a shape larger than any vector": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }", bytes(8)),
        "1 to 1048576 numbers",
    ),
    "a negative shape": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }"),
        "expected 1 to 1048576 numbers, got -1",
    ),
    "two dimensions": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }", bytes(8)),
        r"one dimension, got shape \[2, 1\]",
    ),
    "three dimensions": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2), }", bytes(8)),
        r"one dimension, got shape \[1, 1, 2\]",
    ),
    "fewer than its one row": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }", bytes(4)),
        "expected 8 bytes, got 4",
    ),
    "no dimension": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (), }", bytes(4)),
        r"one dimension, got shape \[\]",
    ),
    "nothing in it": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }"),
        "1 to 1048576",
    ),
    "code for a header": (npy("__import__('os').abort()"), "expected an array in numpy's format"),
    "a deep header": (npy("(" * 9000), "expected an array in numpy's format"),
    "no such number": (
        npy("{'descr': '<f3', 'fortran_order': False, 'shape': (1,), }", bytes(4)),
        "expected an array in numpy's format",
    ),
    "a header too long": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }" + " " * 10_000, bytes(4)),
        "header of at most 10000 bytes",
    ),
    "a length beyond the header": (
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100_000,
        "header of at most 10000 bytes",
    ),
    "a size of many digits": (
        npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0x{'f' * 8000},), }}"),
        "invalid shape",
    ),
    "booleans": (
        npy("{'descr': '|b1', 'fortran_order': False, 'shape': (1,), }", bytes(1)),
        "expected an array of real numbers, got dtype 'bool'",
    ),
    "a structure": (
        npy("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1,), }", bytes(4)),
        "expected an array of real numbers",
    ),
    "more than it says": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
        "longer than the 4 bytes",
    ),
    "not finite": (
        npy(
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }",
            np.asarray([1, np.inf], "<f4").tobytes(),
        ),
        r"tensor '15'\[1\]: expected a finite number",
    ),
}


@pytest.mark.parametrize("name", NPY)
def test_a_hostile_array_is_refused_with_the_reason(tmp_path, name):
    member, problem = NPY[name]
    path = tmp_path / "v.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("15.npy", member)
    with pytest.raises(SpecError, match=problem):
        read_file(path)


def test_a_damaged_member_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, **{"15": np.asarray([1.25, 7.0])})
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<d", 1.25)) + 7] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(SpecError, match="CRC"):
        read_file(path)


GGUFS = {
    "a model": (control_vector({b"direction.1": [1.0]}, architecture=b"llama"), "got 'llama'"),
    "no architecture": (control_vector({b"direction.1": [1.0]}, architecture=None), "got none"),
    "layer 0": (control_vector({b"direction.0": [1.0]}), "layer 0 is unsupported"),
    "another tensor": (control_vector({b"output.weight": [1.0]}), r"expected `direction\.N`"),
    "a layer that is none": (control_vector({b"direction.-1": [1.0]}), r"expected `direction\.N`"),
    "a leading zero": (control_vector({b"direction.01": [1.0]}), "is not a tap"),
    "a matrix": (control_vector({b"direction.1": [[1.0, 2.0], [3.0, 4.0]]}), "one dimension"),
    "quantised": (
        gguf_bytes(
            [(b"general.architecture", 8, text(b"controlvector"))],
            [(b"direction.1", (32,), 8, bytes(34))],
        ),
        r"GGML type 8; expected one of 0 \(F32\), 1 \(F16\)",
    ),
    "empty": (control_vector({}), "the file contains no vectors"),
    "not finite": (control_vector({b"direction.1": [np.nan]}), r"'direction\.1'\[0\]"),
    "cut off": (control_vector({b"direction.1": [1.0] * 32})[:-4], "truncated"),
    "no GGUF": (b"GGML" + bytes(64), "start with"),
}


@pytest.mark.parametrize("name", GGUFS)
def test_what_is_no_control_vector_is_refused_with_the_reason(tmp_path, name):
    data, problem = GGUFS[name]
    path = tmp_path / "v.gguf"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=problem) as caught:
        read_file(path)
    assert str(path) in caught.value.problem


def test_a_models_safetensors_is_refused_by_its_first_key(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"model.layers.0.mlp.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(SpecError, match=r"model\.layers\.0\.mlp\.weight' is not a tap"):
        read_file(path)


def test_a_saved_capture_is_refused_for_its_shape(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"resid_post.3": torch.zeros(5, 2)}, path)
    with pytest.raises(SpecError, match=r"tensor 'resid_post\.3': expected one dimension"):
        read_file(path)


def test_two_keys_for_one_tap_are_refused(tmp_path):
    path = tmp_path / "v.safetensors"
    save_file({"3": torch.ones(2), "post_block.3": torch.ones(2)}, path)
    with pytest.raises(SpecError, match="a second vector for resid_post of layer 3"):
        read_file(path)


def test_too_many_tensors_are_refused_before_any_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ITEMS", 1)
    path = tmp_path / "v.safetensors"
    save_file({"3": torch.ones(2), "4": torch.ones(2)}, path)
    with pytest.raises(SpecError, match="expected at most 1 tensors, got 2"):
        read_file(path)


def whole(ending: str) -> bytes:
    if ending == "gguf":
        return control_vector({b"direction.1": [1.0, 2.0], b"direction.2": [3.0, 4.0]})
    if ending == "npz":
        buffer = io.BytesIO()
        np.savez(buffer, **{"1": np.ones(3), "2": np.ones(3)})
        return buffer.getvalue()
    from safetensors.torch import save

    return save({"1": torch.ones(3), "2": torch.ones(3)})


@pytest.mark.parametrize("ending", ["safetensors", "npz", "gguf"])
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_a_spec_error_or_reads(tmp_path, ending, data):
    damaged = bytearray(whole(ending))
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), max_size=4)
    ):
        damaged[place] = byte
    path = tmp_path / f"v.{ending}"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    with contextlib.suppress(SpecError):
        read_file(path)


def test_other_compression_methods_are_refused_whatever_libraries_added_to_zipfile(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, **{"1": np.ones(8)})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 93  # Zstandard
    path.write_bytes(data)
    with pytest.raises(SpecError, match="1: compression method 93 is not supported"):
        read_file(path)


def test_damage_of_any_compression_is_a_spec_error(tmp_path):
    array = io.BytesIO()
    np.save(array, np.ones(8))
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = tmp_path / "v.npz"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("1.npy", array.getvalue())
        assert found(path) == {("resid_post", 1): Vector.parse(np.ones(8))}
        data = path.read_bytes()
        for place in range(30, len(data)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
            with contextlib.suppress(SpecError):
                read_file(path)
