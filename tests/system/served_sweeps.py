"""Sweeps of a running server, against those of the offline engine."""

from typing import Any

import httpx
import numpy as np
import pytest
from support.engines import HAS_GPU
from support.serving import NAME, Running
from support.serving_offline import ASKED, CASES, FIT, SWEEP, ask, assert_equal, plain

from midstream import Capture, Client
from midstream.client import ServerError
from midstream.lab.sweep import Sweep

# Batches of other sizes round otherwise, on a GPU by what its products of matrices choose.
TOLERANCE = 1e-3 if HAS_GPU else 1e-5


def check(client: Client, server: Running, offline: dict[str, Any]) -> None:
    _check_values(client, Sweep.from_json(offline["sweep"]))
    fitted, wanted = client.fit(**FIT).vectors, offline["fit"].numpy()
    assert np.abs(fitted - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    _check_others(client, server, offline["everything"])


def _check_values(client: Client, expected: Sweep) -> None:
    seen: list[tuple[int, ...]] = []
    found = client.sweep(**SWEEP, model=NAME, on_cell=lambda cell, _: seen.append(cell.index))
    asked: dict[str, Any] = {**ASKED, "capture": Capture(SWEEP["layers"]), "activations": "keep"}
    kept = client.complete(SWEEP["source"], **asked).outputs[0].captured
    assert kept is not None
    # Those of the generated tokens are kept too.
    from_rows = client.sweep(**{**SWEEP, "source": kept.at([0, 1, 2, 3, 4])})
    client.delete(kept)
    assert sorted(seen) == sorted(np.ndindex(1, 3, 5))
    for one in (found, from_rows):
        assert one.dims == expected.dims
        assert (one.coords, one.tokens) == (expected.coords, expected.tokens)
        assert np.abs(one.values - expected.values).max() <= TOLERANCE
        assert abs(one.corrupt - expected.corrupt) <= TOLERANCE
        assert one.noise_floor <= TOLERANCE
        assert one.receipts.status == "ok"
        assert one.receipts.applied == one.receipts.expected == 15
    assert found.clean is not None
    assert expected.clean is not None
    assert abs(found.clean - expected.clean) <= TOLERANCE
    assert from_rows.clean is None
    # The country at early layers, and the last token at late ones, bring the clean answer back.
    assert expected.values.max() - expected.values.min() > 1


def _check_others(client: Client, server: Running, offline: dict[str, Any]) -> None:
    """Check that a request beside a sweep gets what it gets alone, that a sweep ends with its
    client, and that a wrong one is refused.
    """
    before = len(server.log)
    body = {**SWEEP, "metric": SWEEP["metric"].emit(), "layers": "all", "repeats": 0}
    with httpx.stream("POST", f"{server.url}/v1/midstream/sweep", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        assert any("start" in line for line in lines)
        [found] = ask(client, CASES["everything"]).outputs
        # Beside others it is computed in batches of other sizes.
        assert_equal(plain(found), offline, TOLERANCE)
        assert any("cell" in line for line in lines)
    assert server.wait_until_idle()["requests"] == 0
    [ended] = [line for line in server.log[before:].splitlines() if "midstream sweep.ended" in line]
    assert 'status="aborted"' in ended or 'status="ok"' in ended
    with pytest.raises(ServerError) as caught:
        client.sweep(**{**SWEEP, "layers": 99})
    assert (caught.value.status, caught.value.param) == (400, "layers")
