"""The example sinks, with made-up deliveries."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sinking import ORIGIN, WIDTH, activations, delivery

from midstream.config.sinks import plain_sinks, read_sinks
from midstream.sinks.registry import make_sink

EXAMPLES = Path(__file__).parents[3] / "examples" / "sinks"
TAP = "resid_post", 1
ROWS = activations()[TAP]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def made(class_path, **settings):
    settings = {"mine": {"class": class_path, **settings}}
    sink = make_sink(read_sinks(plain_sinks(settings))[0])
    sink.open(ORIGIN)
    return sink


def test_moments_are_those_of_all_rows(tmp_path):
    sink = made("covariance:Covariance", path=str(tmp_path / "m.npz"))
    sink.write(delivery("a"))
    sink.write(delivery("b", activations=activations(positions=[1])))
    sink.flush()
    every = torch.cat([ROWS, activations(positions=[1])[TAP]]).double().numpy()
    with np.load(tmp_path / "m.npz") as file:
        assert file["resid_post.1.rows"] == 3
        np.testing.assert_allclose(file["resid_post.1.mean"], every.mean(axis=0))
        covariance = np.cov(every.T, bias=True)
        np.testing.assert_allclose(file["resid_post.1.covariance"], covariance, atol=1e-9)


def test_norms_are_lines_above_the_limit(tmp_path):
    path = tmp_path / "n.jsonl"
    for limit in (0.0, 1e6):
        sink = made("norm_monitor:NormMonitor", path=str(path), limit=limit)
        sink.write(delivery())
        sink.flush()
    (line,) = path.read_text().splitlines()
    norms = ROWS.norm(dim=1)
    assert json.loads(line)["max"] == {"resid_post.1": pytest.approx(float(norms.max()), abs=1e-4)}


def test_parquet_has_a_line_per_row(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    sink = made("parquet_rows:ParquetRows", root=str(tmp_path / "rows"))
    sink.flush()
    sink.write(delivery(tag="t"))
    sink.flush()
    table = pq.read_table(tmp_path / "rows").to_pylist()
    assert [(one["position"], one["token_id"]) for one in table] == [(0, 100), (2, 102)]
    np.testing.assert_array_equal([one["vector"] for one in table], ROWS.numpy())


def test_rewards_are_means_of_the_probe(tmp_path):
    np.save(tmp_path / "v.npy", np.ones(WIDTH))
    sink = made(
        "probe_reward:ProbeReward",
        vector=str(tmp_path / "v.npy"), layer=1, path=str(tmp_path / "r.jsonl"),
    )  # fmt: skip
    sink.write(delivery())
    sink.flush()
    wanted = float(ROWS.double().sum(dim=1).mean())
    assert sink.rewards == {("7", 0): pytest.approx(wanted)}
    assert json.loads((tmp_path / "r.jsonl").read_text())["reward"] == pytest.approx(wanted)


@pytest.mark.parametrize("status", [200, 500])
def test_rows_are_posted_to_a_service_of_this_machine(status):
    bodies = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    result = made("http_forwarder:HttpForwarder", port=server.server_port).write(delivery())
    thread.join(10)
    server.server_close()
    assert result.status == ("ok" if status == 200 else "error")
    with np.load(io.BytesIO(bodies[0])) as file:
        np.testing.assert_array_equal(file["resid_post.1"], ROWS.numpy())
