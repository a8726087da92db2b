"""The sink `tcp`: records reach readers at least once, and are dropped if they are known."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sinking import ORIGIN, RECEIPT, activations, delivery, put_now
from torch.utils.data import DataLoader

from midstream.config.sinks import read_sinks
from midstream.errors import BusyError, ConfigError, ServerError, SpecError, StoreError
from midstream.sinks.queue import SinkQueue
from midstream.sinks.registry import make_sink
from midstream.sinks.sink_set import SinkSet
from midstream.sinks.tcp import TcpRows, TcpSink
from midstream.sinks.tcp import reader as tcp_reader
from midstream.sinks.tcp import sink as tcp_sink
from midstream.sinks.tcp import spool as tcp_spool


@pytest.fixture(params=["tcp", "nixl"])
def sent(tmp_path: Path, request: Any) -> Iterator[TcpSink]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="scripts/nixl.sh installs it", exc_type=ImportError)
    sink = TcpSink(str(tmp_path / "spool"), 0, transport=request.param)
    sink.open(ORIGIN)
    yield sink
    sink.close()


def send(sink: TcpSink, *names: str, **changes: Any) -> None:
    for name in names:
        sink.write(delivery(name, **changes))
    sink.flush()


def reader(sink: TcpSink, **settings: Any) -> TcpRows:
    return TcpRows(*sink.address, **{"wait_seconds": 10, **settings})


def ids(rows: TcpRows, most: int | None = None) -> list[str]:
    return [one.id for one in islice(rows, most)]


def wait_until(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def files(sink: TcpSink) -> list[Path]:
    return sorted(Path(sink._root).glob("*.rows"))


ENDS = count()


def ids_up_to_now(sink: TcpSink, rows: Iterator[Any]) -> list[str]:
    """What a reader yields before a record that is sent now; no other reader has records."""
    end = f"end{next(ENDS)}"
    send(sink, end)
    names: list[str] = []
    for row in rows:
        if row.id == f"/{end}/0":
            return names
        names.append(row.id)
    raise AssertionError(f"{names}, and then the reader ended")


def all_ids(sink: TcpSink, rows: TcpRows) -> list[str]:
    """Ids that a reader yields of all records, which it acknowledges."""
    wait_until(lambda: not sink._spool._held)  # what earlier readers had is there again
    iterator: Any = iter(rows)
    names = ids_up_to_now(sink, iterator)
    rows.acknowledge()
    iterator.close()
    return names


def test_rows_come_bit_by_bit_with_their_request_and_positions(sent: TcpSink) -> None:
    taps = [("resid_post", 1), ("resid_post", 3)]
    rows = activations(taps, positions=[0, 1, 3])
    send(sent, "a", activations=rows, tag="t", metadata={"label": 1})
    loader = iter(DataLoader(reader(sent), batch_size=None))
    one = next(loader)
    assert (one.id, one.header["request_id"], one.header["status"]) == ("t/a/0", "7", "ok")
    assert one.header["metadata"] == {"label": 1}
    assert one.positions == dict.fromkeys(["resid_post.1", "resid_post.3"], [[0, 2], [3, 4]])
    assert list(one.activations) == taps
    for tap in taps:
        assert torch.equal(one.activations[tap], rows[tap])
        assert torch.equal(one.activations.positions_of(*tap), rows.positions_of(*tap))
    assert ids_up_to_now(sent, loader) == []
    wait_until(lambda: len(files(sent)) == 1)  # the last one has no acknowledgement yet


def test_a_record_is_kept_until_it_is_acknowledged_and_then_deleted(sent: TcpSink) -> None:
    send(sent, "a", "b", "c")
    rows = reader(sent)
    iterator = iter(rows)
    assert next(iterator).id == "/a/0"
    assert len(files(sent)) == 3
    assert next(iterator).id == "/b/0"
    wait_until(lambda: len(files(sent)) == 2)
    iterator.close()  # type: ignore[attr-defined]
    # `b` was yielded, and no other was asked for: it comes again, and is dropped.
    assert all_ids(sent, rows) == ["/c/0"]
    assert rows.doubles == 1
    wait_until(lambda: not files(sent))


def test_a_trainer_that_takes_longer_than_the_wait_for_rows_keeps_its_connection(
    sent: TcpSink,
) -> None:
    send(sent, "a")
    iterator = iter(reader(sent, wait_seconds=0.4))
    assert next(iterator).id == "/a/0"
    connected = set(sent._readers)
    time.sleep(0.6)
    send(sent, "b")
    assert next(iterator).id == "/b/0"
    assert sent._readers == connected


def test_the_next_record_is_received_while_the_trainer_has_one(
    sent: TcpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = threading.Event()
    parsed = tcp_reader._parsed

    def noted(number: int, file: Any) -> Any:
        found = parsed(number, file)
        if found[0]["name"] == "b":
            received.set()
        return found

    monkeypatch.setattr(tcp_reader, "_parsed", noted)
    send(sent, "a", "b")
    iterator = iter(reader(sent))
    assert next(iterator).id == "/a/0"
    assert received.wait(10)
    assert len(files(sent)) == 2  # nothing is acknowledged yet


def test_a_new_reader_gets_what_its_predecessor_had_and_drops_what_a_state_knows(
    sent: TcpSink,
) -> None:
    send(sent, *"abcd")
    first = reader(sent, manual=True)
    iterator = iter(first)
    assert [next(iterator).id for _ in range(2)] == ["/a/0", "/b/0"]
    state = json.loads(json.dumps(first.state_dict()))
    assert next(iterator).id == "/c/0"
    iterator.close()  # type: ignore[attr-defined]
    assert len(files(sent)) == 4
    second = reader(sent, manual=True)
    second.load_state_dict(state)
    iterator = iter(second)
    assert [next(iterator).id for _ in range(2)] == ["/c/0", "/d/0"]
    assert second.doubles == 2
    wait_until(lambda: len(files(sent)) == 2)
    second.acknowledge()
    wait_until(lambda: not files(sent))


def test_a_request_that_is_sent_again_under_its_name_is_dropped(sent: TcpSink) -> None:
    send(sent, "a", "b", "a")
    rows = reader(sent)
    assert all_ids(sent, rows) == ["/a/0", "/b/0"]
    known = reader(sent)
    known.know(["/c/0"])
    send(sent, "c", "d")
    assert all_ids(sent, known) == ["/d/0"]
    wait_until(lambda: not files(sent))


def test_records_outlive_their_process_and_half_a_record_does_not(tmp_path: Path) -> None:
    first = TcpSink(str(tmp_path / "spool"), 0)
    first.open(ORIGIN)
    send(first, "a", "b")
    first.write(delivery("unfinished"))
    with pytest.raises(StoreError, match="another process sends these rows"):
        TcpSink(str(tmp_path / "spool"), 0).open(ORIGIN)
    first.close()
    second = TcpSink(str(tmp_path / "spool"), 0)
    second.open(ORIGIN)
    send(second, "c")
    assert ids(reader(second), 3) == ["/a/0", "/b/0", "/c/0"]
    second.close()


def test_a_full_spool_lets_writes_wait_for_a_reader_and_loses_nothing(tmp_path: Path) -> None:
    sink = TcpSink(str(tmp_path / "spool"), 0, spool_bytes=4096)
    sink.open(ORIGIN)
    queue, names = SinkQueue("tcp", sink, 4096), [f"r{number}" for number in range(40)]
    results = []

    def fill() -> None:
        results.extend(queue.put(delivery(name), 512) for name in names)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "nobody reads, and the engine goes on"
    assert sum(path.stat().st_size for path in files(sink)) <= 4096
    rows, seen = reader(sink), []
    for one in islice(rows, 40):
        seen.append(one.id)
        time.sleep(0.005)
    thread.join(10)
    assert [result.result(10).status for result in results] == ["ok"] * 40
    assert seen == [f"/{name}/0" for name in names]
    queue.close()


def test_a_write_that_waits_lets_readers_have_those_before_it_that_nobody_flushed(
    tmp_path: Path,
) -> None:
    sink = TcpSink(str(tmp_path / "spool"), 0, spool_bytes=1, wait_seconds=20)
    sink.open(ORIGIN)
    writes = threading.Thread(target=lambda: [sink.write(delivery(name)) for name in "ab"])
    writes.start()
    rows = reader(sink, manual=True)
    iterator = iter(rows)
    assert next(iterator).id == "/a/0"
    rows.acknowledge()
    writes.join(30)
    assert not writes.is_alive()
    assert files(sink) == []
    assert len(list((tmp_path / "spool").glob("*.part"))) == 1
    sink.close()


def test_a_write_without_a_reader_fails_in_time_and_says_why(tmp_path: Path) -> None:
    sink = TcpSink(str(tmp_path / "spool"), 0, spool_bytes=1, wait_seconds=0.1)
    sink.open(ORIGIN)
    queue = SinkQueue("tcp", sink, 4096)
    assert put_now(queue, delivery("a"), 10).status == "ok"
    failed = put_now(queue, delivery("b"), 10)
    assert failed.status == "error"
    assert "no reader acknowledged rows for 0.1 s" in failed.reason
    queue.close()


def test_a_write_may_wait_for_a_reader_longer_than_a_call(tmp_path: Path) -> None:
    settings = {"root": str(tmp_path), "port": 0, "spool_bytes": 1, "call_seconds": 0.2}
    sinks = SinkSet(read_sinks({"tcp": settings}), ORIGIN)
    queue = sinks.queue("tcp")
    results = [queue.put(delivery(name), 10) for name in "ab"]
    sink: Any = queue._sink
    wait_until(lambda: files(sink))
    time.sleep(0.5)
    assert not results[1].done()
    queue.drain()  # it is flushed when it is written, and not some seconds later
    assert ids(reader(sink), 2) == ["/a/0", "/b/0"]
    assert [result.result(10).status for result in results] == ["ok", "ok"]
    sinks.close()


def test_readers_share_records_and_one_that_ends_leaves_its_own(sent: TcpSink) -> None:
    send(sent, *"abcdef")
    one = iter(reader(sent, window_bytes=1))
    other = iter(reader(sent, window_bytes=1))
    names = {next(one).id, next(other).id}
    one.close()  # type: ignore[attr-defined]
    wait_until(lambda: len(sent._spool._held) == 1)
    names.update(ids_up_to_now(sent, other))
    assert names == {f"/{name}/0" for name in "abcdef"}


def test_a_reader_that_acknowledges_nothing_is_told_so(sent: TcpSink) -> None:
    send(sent, "a", "b")
    iterator = iter(reader(sent, manual=True, window_bytes=1))
    next(iterator)
    with pytest.raises(BusyError, match="fills `window_bytes`"):
        next(iterator)


def test_a_reader_without_the_token_gets_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "token").write_text("secret\n")
    sink = TcpSink(str(tmp_path / "spool"), 0, token_file=str(tmp_path / "token"))
    sink.open(ORIGIN)
    send(sink, "a")
    with pytest.raises(ServerError, match="the token is wrong"):
        ids(reader(sink, token="other"))
    monkeypatch.setattr(tcp_sink, "_HELLO_SECONDS", 0.2)
    for greeting in (b"", b"{}\n", b"[]\n", b'{"midstream": 2}\n', b"[" * 4096, b"\xff\n"):
        with socket.create_connection(sink.address, 5) as end:
            end.sendall(greeting)
            assert b'"model"' not in end.makefile("rb").read()
    assert ids(reader(sink, token="secret"), 1) == ["/a/0"]
    sink.close()


def test_an_acknowledgement_of_anothers_record_deletes_nothing(sent: TcpSink) -> None:
    send(sent, "a")
    number = int(files(sent)[0].stem)
    with socket.create_connection(sent.address, 5) as end:
        end.sendall(b'{"midstream": 1, "token": "", "window": 9}\n')
        end.makefile("rb").readline()
        end.sendall(tcp_sink.NUMBER.pack(number + 1))
        end.makefile("rb").read()
    assert ids(reader(sent), 1) == ["/a/0"]


def test_a_damaged_record_is_an_error_of_the_reader(sent: TcpSink) -> None:
    send(sent, "a")
    [path] = files(sent)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ServerError, match="is damaged"):
        ids(reader(sent))


def test_what_is_malformed_is_refused() -> None:
    for settings, said in (
        ({"root": "", "port": 1}, "root: expected the path of a folder"),
        ({"root": "a", "port": 65536}, "port: expected 0 to 65535"),
        ({"root": "a", "port": 1, "host": "0.0.0.0"}, "token_file: missing"),
        ({"root": "a"}, "missing a required argument: 'port'"),
    ):
        [read] = read_sinks({"tcp": settings})
        with pytest.raises(ConfigError, match=said):
            make_sink(read)
    with pytest.raises(SpecError, match="window_bytes"):
        TcpRows("127.0.0.1", 1, window_bytes=0)
    with pytest.raises(SpecError, match="state: expected a state of state_dict"):
        TcpRows("127.0.0.1", 1).load_state_dict({"known": [1]})
    with pytest.raises(RuntimeError, match="num_workers: expected 0"):
        next(iter(DataLoader(TcpRows("127.0.0.1", 1), batch_size=None, num_workers=1)))
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: listening.accept()[0].sendall(b"HTTP/1.1\n")).start()
    with pytest.raises(ServerError, match="expected a sink tcp"):
        ids(TcpRows(*listening.getsockname()[:2]))


def test_a_record_whose_file_is_gone_stops_nobody(sent: TcpSink) -> None:
    send(sent, "a", "b", "c")
    files(sent)[1].unlink()
    assert all_ids(sent, reader(sent)) == ["/a/0", "/c/0"]
    wait_until(lambda: sent._spool.nbytes == 0)


def test_a_header_that_no_reader_takes_is_refused_when_it_is_written(
    sent: TcpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_spool, "MOST_HEADER", 2000)
    with pytest.raises(ValueError, match="2,000; capture ranges of positions"):
        sent.write(delivery("long", metadata={"note": "x" * 2000}))
    send(sent, "b")
    assert all_ids(sent, reader(sent)) == ["/b/0"]


def test_a_completion_that_lacks_rows_is_no_double_of_one_that_has_them(sent: TcpSink) -> None:
    lacking = replace(RECEIPT, problems=("dropped",))
    send(sent, "a", receipt=lacking)
    send(sent, "a", receipt=lacking)
    send(sent, "a", "a")
    send(sent, "a", receipt=lacking)
    send(sent, "end")
    rows = reader(sent)
    iterator = iter(rows)
    before_end = takewhile(lambda one: one.id != "/end/0", iterator)
    assert [one.header["status"] for one in before_end] == [lacking.status, "ok"]
    assert rows.doubles == 3
    rows.acknowledge()
    wait_until(lambda: not files(sent))


def test_strangers_that_say_nothing_take_no_place_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_sink, "MOST_READERS", 3)
    sink = TcpSink(str(tmp_path / "spool"), 0)
    sink.open(ORIGIN)
    strangers = [socket.create_connection(sink.address) for _ in range(7)]
    send(sink, "a")
    assert ids(reader(sink, wait_seconds=3), 1) == ["/a/0"]
    strangers[0].settimeout(5)
    assert strangers[0].recv(4096) == b""  # the first one had to go
    assert len(sink._strangers) <= 3
    sink.close()
    for stranger in strangers:
        stranger.close()


def test_a_length_without_its_bytes_takes_no_memory() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def lie() -> None:
        end, _ = server.accept()
        end.recv(4096)
        greeting = {"midstream": 1, "error": "", "transport": "tcp", "model": "m"}
        record = tcp_sink.NUMBER.pack(1) + tcp_spool.LENGTHS.pack(10, tcp_spool.MOST_ROWS)
        end.sendall(json.dumps(greeting).encode() + b"\n" + record + bytes(100))
        end.close()
        server.close()

    threading.Thread(target=lie, daemon=True).start()
    assert ids(TcpRows(*server.getsockname(), wait_seconds=0.5)) == []
