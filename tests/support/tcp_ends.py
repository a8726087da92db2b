"""Both ends of a sink `tcp`, processes that may be killed: `sender` or `receiver`, FOLDER PORT
TRANSPORT.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from midstream.results.activations import Activations
from midstream.sinks.queue import SinkQueue
from midstream.sinks.tcp import TcpRows, TcpSink
from midstream.sinks.tcp.spool import LENGTHS
from support.sinking import ORIGIN, delivery

COUNT = 240
TAPS = [("resid_post", 1), ("resid_post", 3)]
SPOOL = 16 << 10  # of a dozen records


def rows_of(number: int) -> Activations:
    """Rows whose number and values are those of their request."""
    import torch

    at = torch.arange(1 + number % 5)
    made = torch.Generator().manual_seed(number)
    values = {tap: torch.randn(len(at), ORIGIN.hidden_size, generator=made) for tap in TAPS}
    return Activations(values, dict.fromkeys(values, at), at + 100)


def text_of(rows: Activations) -> str:
    """The bits of rows."""
    return "".join(rows[tap].numpy().tobytes().hex() for tap in TAPS)


def lines(path: Path) -> list[Any]:
    """Whole lines of a file, JSON; half a line at the end is cut off."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def id_of(path: Path) -> str:
    """The id of a record of a spool."""
    data = path.read_bytes()
    (length, _), start = LENGTHS.unpack_from(data), LENGTHS.size
    return str(json.loads(data[start : start + length])["id"])


def send(folder: Path, port: int, transport: str) -> None:
    """Send what no earlier process was told is stored, as a caller that asks again does."""
    more: dict[str, Any] = {"linger_seconds": 20, "transport": transport}
    sink = TcpSink(str(folder / "spool"), port, spool_bytes=SPOOL, **more)
    sink.open(ORIGIN)
    queue = SinkQueue("tcp", sink, 4096)
    stored = set(lines(folder / "stored"))
    with (folder / "stored").open("a") as file:
        for first in range(0, COUNT, 6):
            numbers = [at for at in range(first, first + 6) if at not in stored]
            made = [delivery(f"r{at}", activations=rows_of(at)) for at in numbers]
            results = [queue.put(one, 256) for one in made]
            queue.drain()
            assert [result.result(120).status for result in results] == ["ok"] * len(results)
            file.writelines(f"{number}\n" for number in numbers)
            file.flush()
    queue.close()


def receive(folder: Path, port: int, _: str) -> None:
    """Keep what no earlier process kept, until all is there; slower than the sender."""
    known = {line["id"] for line in lines(folder / "rows")}
    # Doubles may come after the last one: of a sender that was killed before it knew of them.
    reader = TcpRows("127.0.0.1", port, wait_seconds=5)
    reader.know(known)
    with (folder / "rows").open("a") as file:
        while len(known) < COUNT:
            for one in reader:
                file.write(json.dumps({"id": one.id, "rows": text_of(one.activations)}) + "\n")
                file.flush()
                known.add(one.id)
                time.sleep(0.005)


if __name__ == "__main__":
    _, end, own_folder, own_port, by = sys.argv
    {"sender": send, "receiver": receive}[end](Path(own_folder), int(own_port), by)
