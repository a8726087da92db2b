"""Functions that workers import, and reused rows, where the engine and the server are processes of
their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support import serving
from support.own_process import python

from midstream import Capture, Client


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("local") / "found.pt"
    python("-m", "nightly.local_async", tiny_llama, out, timeout=580)
    loaded: dict[str, Any] = torch.load(out)
    return loaded


def test_a_function_that_workers_can_import_runs_in_their_process(found: dict[str, Any]) -> None:
    torch.testing.assert_close(found["local"], 0.5 * found["plain"], rtol=1e-5, atol=1e-5)
    assert found["called"] == ("support.local_functions:halve", 150, 1)


def test_a_function_that_they_cannot_import_is_rejected(found: dict[str, Any]) -> None:
    assert "cannot import" in found["rejected"]
    assert found["rejected"].startswith("edits")


def test_a_function_that_fails_ends_its_request_alone(found: dict[str, Any]) -> None:
    assert "raised ValueError: not today" in found["failed"]
    torch.testing.assert_close(found["beside"], found["plain"])


def test_rows_are_reused_by_later_requests(found: dict[str, Any]) -> None:
    assert [each["reused"] for each in found["reuse"]] == [0, 128, 128]
    assert [each["cached"] for each in found["reuse"]] == [0, 128, 128]
    cold, *warm = found["reuse"]
    for each in warm:
        assert torch.equal(each["rows"][:128], cold["rows"][:128])
        torch.testing.assert_close(each["rows"], cold["rows"], rtol=1e-5, atol=1e-5)


def test_rows_are_reused_over_http_and_no_function_comes_by_it(
    smollm2: Path, tmp_path: Path
) -> None:
    options = (
        "--sites=resid_post",
        "--enable-prefix-caching",
        serving.settings(reuse_bytes=64 << 20, hooks="local"),
    )
    with serving.running(serving.command(smollm2, *options), tmp_path) as server:
        client = Client(server.url)
        prompt = [3 + nth % 150 for nth in range(100)]
        asked: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
        cold, warm = (
            client.complete(prompt, model=serving.NAME, capture=Capture("all", reuse=True), **asked)
            for _ in range(2)
        )
        for each, expected in ((cold, 0), (warm, 96)):
            assert {one.reused for one in each.outputs[0].receipt.captured} == {expected}
        for tap in cold.activations:
            assert torch.equal(warm.activations[tap][:96], cold.activations[tap][:96])
        function = {"op": "local", "fn": "json:dumps", "layer": 1}
        body = {"model": serving.NAME, "prompt": prompt, **asked}
        answer = httpx.post(
            f"{server.url}/v1/completions", json={**body, "midstream": {"edits": function}}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("midstream.edits")
        assert "functions run only where they are given in Python" in answer.text
