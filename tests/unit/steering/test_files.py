"""Files of vectors, and files that pretend to be some."""

import contextlib
import io
import os
import pickle
import re
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.gguf_file import gguf_bytes, text
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Vector
from midstream.plan.vectors.matrix import matrix_of
from midstream.steering import files
from midstream.steering.files import read_file, read_json_file
from midstream.steering.parse import read_placed

ROWS = {"15": [1.0, 2.5], "pre_attn:0": [-3.0, 0.5]}
WANTED = {("resid_post", 15): Vector.parse([1.0, 2.5]), ("resid_pre", 0): Vector.parse([-3.0, 0.5])}


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


def test_files_of_every_float_type(tmp_path):
    path = tmp_path / "v.safetensors"
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        save_file({key: torch.tensor(row, dtype=dtype) for key, row in ROWS.items()}, path)
        assert found(path) == found(str(path)) == WANTED
    path = tmp_path / "v.npz"
    for dtype in ("<f4", ">f4", "<f2", "<f8"):
        for save in (np.savez, np.savez_compressed):
            save(path, **{key: np.asarray(row, dtype) for key, row in ROWS.items()})
            assert found(path) == WANTED
    # A control vector's direction n is resid_post of layer n.
    path = tmp_path / "happy.gguf"
    given_ = {b"direction.1": [1.0, 2.5], b"direction.15": [-3.0, 0.5]}
    for kind, dtype in ((0, "<f4"), (1, "<f2")):
        path.write_bytes(control_vector(given_, kind=kind, dtype=dtype))
        assert found(path) == {
            ("resid_post", 1): Vector.parse([1.0, 2.5]),
            ("resid_post", 15): Vector.parse([-3.0, 0.5]),
        }


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


def test_one_row_is_the_vector_that_it_is_by_value(tmp_path):
    row = [[1.0, 2.5, -3.0]]
    for suffix in (".safetensors", ".npz", ".gguf"):
        (read,) = read_file(_written(tmp_path, suffix, {"direction.15": row}))
        assert read.vector == Vector.parse(torch.tensor(row)) == Vector.parse(row[0])
        if suffix != ".gguf":  # llama.cpp's files have directions of layers alone
            assert read_file(_written(tmp_path, suffix, {"vector": row})) == read.vector


NAMES = {
    "blocks.15.hook_resid_post": ("resid_post", 15),
    "blocks.0.attn.hook_z": ("z", 0),
    "model.layers.3.mlp.output": ("mlp_out", 3),
    "model.layers.7": ("resid_post", 7),
    "transformer.h[2].output[0]": ("resid_post", 2),
    "layer_16": ("resid_post", 16),
    "layer17": ("resid_post", 17),
    "vector.18": ("resid_post", 18),
    "steering_vectors.19": ("resid_post", 19),
    "layer_20.vector": ("resid_post", 20),
    "resid_post_21": ("resid_post", 21),
    "layer_22.mlp_out": ("mlp_out", 22),
    "attn_out.layer.23": ("attn_out", 23),
}


def test_keys_are_any_name_of_a_site_and_a_layer(tmp_path):
    rows = {key: [float(nth), 1.0] for nth, key in enumerate(NAMES)}
    wanted = {NAMES[key]: Vector.parse(row) for key, row in rows.items()}
    for suffix in (".safetensors", ".npz"):
        assert found(_written(tmp_path, suffix, rows)) == wanted
    assert {(one.site, one.layer): one.vector for one in read_placed(rows)} == wanted


def test_keys_that_name_no_tap_or_one_twice_are_refused(tmp_path):
    refused(
        lambda rows: read_file(_written(tmp_path, ".npz", rows)),
        ({"hook_resid_post": [1.0]}, "names no layer"),
        ({"ln_final.hook_out": [1.0]}, "has no layer"),
        ({"15": [1.0], "blocks.15.hook_resid_post": [2.0]}, "a second vector for resid_post of"),
    )
    refused(
        lambda rows: read_file(_written(tmp_path, ".safetensors", rows)),
        ({"model.layers.0.mlp.weight": [[0.0]]}, r"model\.layers\.0\.mlp\.weight' is not a tap"),
        ({"resid_post.3": [[0.0]] * 5}, r"tensor 'resid_post\.3': expected one dimension"),
    )


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "v.json"
    path.write_text('{"resid_post": {"15": [1.0, 2.5]}}', encoding="utf-8-sig")
    assert read_json_file(path) == {"resid_post": {"15": [1.0, 2.5]}}


def test_other_files_are_refused_with_those_that_are_read(tmp_path):
    (tmp_path / "a.npz").mkdir()
    os.mkfifo(tmp_path / "b.npz")
    pickles = (".bin", ".pkl", ".PKL", ".ckpt", ".joblib")
    refused(
        lambda name: read_file(tmp_path / name),
        *((f"not there{end}", "hold pickles, which can run code.*safetensors") for end in pickles),
        (
            "v.yaml",
            r"expected \.safetensors, \.npz, \.gguf, \.pt or \.json, got the suffix '\.yaml'",
        ),
        ("v", "a name without a suffix"),
        ("v.npy", "names no layer"),
        ("v.npz", "No such file"),
        ("v\0.npz", "invalid file name"),
        ("a.npz", "not a regular file"),
        ("b.npz", "not a regular file"),
    )


def test_too_large_a_file_is_refused_before_it_is_read(tmp_path):
    for ending in ("safetensors", "npz", "gguf"):
        path = tmp_path / f"v.{ending}"
        most = files.MAX_MATRIX_BYTES if ending == "safetensors" else files.MAX_FILE_BYTES
        with path.open("wb") as file:
            file.truncate(most + 1)
        refused(read_file, (path, f"at most {most}"))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_files_of_torch_hold_a_vector_or_vectors_by_tap_and_run_nothing(tmp_path):
    row = torch.tensor([1.0, 2.5])
    path = tmp_path / "v.pt"
    for value in (row, row[None], {"vector": row}, {"steering_vector": row.half()}):
        torch.save(value, path)
        assert read_file(path) == Vector.parse(row)
    for value, taps in (
        ({3: row, 15: row}, [("resid_post", 3), ("resid_post", 15)]),
        ({"layer_3": row, "mlp_out.1": row}, [("resid_post", 3), ("mlp_out", 1)]),
        ({"attn_out": {0: row}}, [("attn_out", 0)]),
    ):
        torch.save(value, path)
        found = read_file(path)
        assert [(one.site, one.layer) for one in found] == taps
        assert all(one.vector == Vector.parse(row) for one in found)
    cases = []
    for nth, (value, words) in enumerate((
        (torch.ones(3, 2), r"tensor of shape \[3, 2\], which does not say of which layers"),
        ({"hidden_states.3": row}, "'hidden_states.3' is not a tap|unknown site"),
        ({"15": Bomb()}, "expected a file of tensors alone, which runs no code"),
        ([row], "expected"),
    )):  # fmt: skip
        torch.save(value, tmp_path / f"{nth}.pt")
        cases.append((tmp_path / f"{nth}.pt", words))
    (tmp_path / "no.pth").write_bytes(b"\x80")
    refused(read_file, *cases, (tmp_path / "no.pth", "expected a file of tensors alone"))


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


def of_shape(shape: str, data: bytes = b"", descr: str = "'<f4'", more: str = "") -> bytes:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}{more}", data)


NUMPYS = "expected an array in numpy's format"
NPY = (
    (of_shape("(1000,)", bytes(8)), "expected 4000 bytes, got 8"),
    (of_shape("(999999999999,)", bytes(8)), "1 to 1048576 numbers"),
    (of_shape("(-1,)"), "expected 1 to 1048576 numbers, got -1"),
    (of_shape("(2, 1)", bytes(8)), r"one dimension, got shape \[2, 1\]"),
    (of_shape("(1, 1, 2)", bytes(8)), r"one dimension, got shape \[1, 1, 2\]"),
    (of_shape("(1, 2)", bytes(4)), "expected 8 bytes, got 4"),
    (of_shape("()", bytes(4)), r"one dimension, got shape \[\]"),
    (of_shape("(0,)"), "1 to 1048576"),
    (npy("__import__('os').abort()"), NUMPYS),
    (npy("(" * 9000), NUMPYS),
    (of_shape("(1,)", bytes(4), "'<f3'"), NUMPYS),
    (of_shape("(1,)", bytes(4), more=" " * 10_000), "header of at most 10000 bytes"),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100_000, "header of at most 10000 bytes"),
    (of_shape(f"(0x{'f' * 8000},)"), "invalid shape"),
    (of_shape("(1,)", bytes(1), "'|b1'"), "expected an array of real numbers, got dtype 'bool'"),
    (of_shape("(1,)", bytes(4), "[('x', '<f4')]"), "expected an array of real numbers"),
    (of_shape("(1,)", bytes(8)), "longer than the 4 bytes"),
    (of_shape("(2,)", struct.pack("<2f", 1, np.inf)), r"tensor '15'\[1\]: expected a finite"),
)


def test_a_hostile_array_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "v.npz"

    def read(member):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("15.npy", member)
        return read_file(path)

    refused(read, *NPY)


def test_a_damaged_member_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "v.npz"
    np.savez(path, **{"15": np.asarray([1.25, 7.0])})
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<d", 1.25)) + 7] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(SpecError, match="CRC"):
        read_file(path)


def test_what_is_no_control_vector_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "v.gguf"

    def read(data):
        path.write_bytes(data)
        return read_file(path)

    quantised = [(b"general.architecture", 8, text(b"controlvector"))]
    refused(
        read,
        (control_vector({b"direction.1": [1.0]}, architecture=b"llama"), "got 'llama'"),
        (control_vector({b"direction.1": [1.0]}, architecture=None), "got none"),
        (control_vector({b"direction.0": [1.0]}), "layer 0 is unsupported"),
        (control_vector({b"output.weight": [1.0]}), r"expected `direction\.N`"),
        (control_vector({b"direction.-1": [1.0]}), r"expected `direction\.N`"),
        (control_vector({b"direction.01": [1.0]}), "is not a tap"),
        (control_vector({b"direction.1": [[1.0, 2.0], [3.0, 4.0]]}), "one dimension"),
        (
            gguf_bytes(quantised, [(b"direction.1", (32,), 8, bytes(34))]),
            r"GGML type 8; expected one of 0 \(F32\), 1 \(F16\)",
        ),
        (control_vector({}), "the file contains no vectors"),
        (control_vector({b"direction.1": [np.nan]}), r"'direction\.1'\[0\]"),
        (control_vector({b"direction.1": [1.0] * 32})[:-4], "truncated"),
        (b"GGML" + bytes(64), "start with"),
        (control_vector({}), re.escape(str(path))),
    )


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
