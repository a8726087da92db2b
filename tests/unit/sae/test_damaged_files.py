"""Files of sparse autoencoders that are damaged or malicious, and numbers that are no scale."""

import io
import zipfile

import numpy as np
import pytest
from support.refusals import refused
from support.sae_oracle import RandomSae

from midstream.errors import SpecError
from midstream.sae.sae import SAE


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_of_an_npz_file_is_a_spec_error_that_names_it(tmp_path, method):
    given = RandomSae("jumprelu", 3, 5, "blocks.1.hook_resid_post")
    path = tmp_path / "params.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, tensor in given.tensors.items():
            np.save(data := io.BytesIO(), tensor.numpy())
            archive.writestr(f"{name}.npy", data.getvalue())
    assert SAE.load(path).num_features == 5
    data = path.read_bytes()
    wrong = []
    for place in range(0, len(data), 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            SAE.load(path)
        except SpecError as error:
            wrong.append(str(error))
    assert wrong
    assert all(one.startswith(str(path)) for one in wrong)


def test_a_size_in_a_header_asks_for_no_memory_that_there_is_not(tmp_path):
    given = RandomSae("jumprelu", 3, 5, "blocks.1.hook_resid_post")
    path = tmp_path / "params.npz"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1125899906842624,), }"
    header += b" " * (-(11 + len(header)) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)
    with zipfile.ZipFile(path, "w") as archive:
        for name in given.tensors:
            archive.writestr(f"{name}.npy", array)
    with pytest.raises(SpecError, match=r"params\.npz: expected a \.npz file of arrays"):
        SAE.load(path)


def test_a_scale_that_weights_cannot_be_divided_by_is_refused(tmp_path):
    given = RandomSae("standard", 3, 5, "blocks.1.hook_resid_post")
    given.config["normalize_activations"] = "expected_average_only_in"
    folder = given.write(tmp_path)
    scales = (0, -1.0, float("nan"), float("inf"), 1e-300, "0.5", True)
    refused(
        lambda scale: SAE.load(folder, input_scale=scale),
        *((scale, "^input_scale: expected a ") for scale in scales),
    )
