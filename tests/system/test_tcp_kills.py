"""Both ends of a sink `tcp` are killed at random, and every row is kept once."""

import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import own_process, serving, tcp_ends
from support.nightly import NIGHTLY

KILLS = 12
ENDS = ("sender", "receiver")


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
@pytest.mark.parametrize("seed", range(10 if NIGHTLY else 1))
def test_every_row_is_kept_once_bit_by_bit_whichever_end_is_killed(
    seed: int, transport: str, tmp_path: Path
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl", reason="scripts/nixl.sh installs it", exc_type=ImportError)
    chance, port = random.Random(seed), str(serving.free_port())
    log = (tmp_path / "log").open("wb")

    def start(end: str) -> Any:
        arguments = ("-m", "support.tcp_ends", end, tmp_path, port, transport)
        more = {"stdout": log, "stderr": subprocess.STDOUT, "env": serving.environment()}
        return own_process.start(*arguments, **more)

    running = {end: start(end) for end in ENDS}
    try:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.02, 0.5))
            end = chance.choice(ENDS)
            running[end].kill()
            running[end].wait(60)
            running[end] = start(end)
        for end in ENDS[::-1]:
            assert running[end].wait(180) == 0, (tmp_path / "log").read_text()
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
        log.close()
    kept = tcp_ends.lines(tmp_path / "rows")
    assert set(Counter(one["id"] for one in kept).values()) == {1}
    wanted = {f"/r{n}/0": tcp_ends.text_of(tcp_ends.rows_of(n)) for n in range(tcp_ends.COUNT)}
    assert {one["id"]: one["rows"] for one in kept} == wanted
    # A sender that took long to start again may have sent doubles that nobody read any more.
    left = [tcp_ends.id_of(path) for path in (tmp_path / "spool").glob("*.rows")]
    assert set(left) <= set(wanted)
