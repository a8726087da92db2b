"""An engine whose rows go to a reader by the sink `tcp`, which may be slow."""

import threading
import time
from pathlib import Path

import torch
from support.cached_pair import fresh
from support.engines import engine, greedy

from midstream import Capture
from midstream.sinks.tcp import TcpRows, TcpSink

REQUESTS = 30


def test_a_reader_that_does_not_read_holds_requests_up_and_gets_every_row_bit_by_bit(
    tiny_llama: Path, tmp_path: Path
) -> None:
    sink = TcpSink(str(tmp_path / "spool"), 0, spool_bytes=64 << 10)
    settings = {"sites": ["resid_post"], "sinks": {"rows": {"instance": sink, "queue_bytes": 4096}}}
    prompts = [{"prompt_token_ids": fresh(16 + at)} for at in range(REQUESTS)]
    captures = [
        [Capture("all"), Capture("all", sink="rows", request_id=f"r{at}")] for at in range(REQUESTS)
    ]
    outputs = []
    with engine(tiny_llama, midstream=settings, max_num_seqs=4) as llm:

        def generate() -> None:
            params = greedy(2, detokenize=False)
            outputs.extend(llm.generate(prompts, params, capture=captures, use_tqdm=False))

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        while sum(path.stat().st_size for path in (tmp_path / "spool").glob("*.rows")) < 32 << 10:
            assert thread.is_alive()
            time.sleep(0.02)
        thread.join(1)
        assert thread.is_alive(), "requests end though nobody takes their rows"
        received = {}
        for one in TcpRows(*sink.address):
            received[one.header["name"]] = one.activations
            if len(received) == REQUESTS:
                break
            time.sleep(0.01)
        thread.join(60)
        assert len(outputs) == REQUESTS
        for at, output in enumerate(outputs):
            assert output.capture_results["rows"].status == "ok"
            rows = received[f"r{at}"]
            for tap in output.activations:
                assert torch.equal(rows[tap], output.activations[tap])
                positions = output.activations.positions_of(*tap)
                assert torch.equal(rows.positions_of(*tap), positions)
        outputs.clear()
