"""Files of JSON lines: rotated, shared by processes, whole after a kill."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from midstream.config.event_sinks import JsonLinesSettings
from midstream.sinks.events.json_lines import JsonLinesFile, JsonLinesSink

CHILD = """
import sys
from midstream.sinks.events.json_lines import JsonLinesFile
file = JsonLinesFile(sys.argv[1], rotate_bytes=int(sys.argv[3]), keep=1000, fsync="never")
for number in range(int(sys.argv[4])):
    file.append([b'{"from": %s, "number": %d}' % (sys.argv[2].encode(), number)])
    if number == 200:
        print("on its way", flush=True)
"""


def child(path, name, rotate_bytes, count):
    words = [sys.executable, "-c", CHILD, str(path), str(name), str(rotate_bytes), str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def rows(*paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_file_is_rotated_by_size_and_the_oldest_is_removed(tmp_path):
    path = tmp_path / "events.jsonl"
    file = JsonLinesFile(str(path), rotate_bytes=25, keep=2)
    for number in range(10):
        file.append([b"%010d" % number])
    file.close()
    assert path.read_text() == "0000000008\n0000000009\n"
    assert (tmp_path / "events.jsonl.1").read_text() == "0000000006\n0000000007\n"
    assert (tmp_path / "events.jsonl.2").read_text() == "0000000004\n0000000005\n"
    assert not (tmp_path / "events.jsonl.3").exists()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.engine  # starts processes
def test_processes_share_a_file_and_each_line_is_there_once_and_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    processes = [child(path, name, 2000, 300) for name in range(3)]
    for process in processes:
        assert process.wait(60) == 0
        process.stdout.close()
    written = rows(path, *tmp_path.glob("events.jsonl.*[0-9]"))
    assert sorted((row["from"], row["number"]) for row in written) == [
        (name, number) for name in range(3) for number in range(300)
    ]
    assert len(list(tmp_path.glob("events.jsonl.*[0-9]"))) > 5


@pytest.mark.engine  # starts processes
def test_after_a_kill_every_line_but_maybe_the_last_is_whole_and_none_before_it_is_missing(
    tmp_path,
):
    path = tmp_path / "events.jsonl"
    process = child(path, 0, 1 << 30, 10**7)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    lines = path.read_bytes().split(b"\n")[:-1]
    written = [json.loads(line)["number"] for line in lines]
    assert len(written) > 200
    assert written == list(range(len(written)))
    # Half a line, as a kill within a write would leave it.
    with path.open("ab") as half:
        half.write(b'{"from": 0, "numb')
    file = JsonLinesFile(str(path))
    file.append([b'{"from": 1, "number": 0}'])
    file.close()
    *_, torn, last = path.read_bytes().splitlines()
    assert torn == b'{"from": 0, "numb'
    assert json.loads(last) == {"from": 1, "number": 0}


def test_a_write_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    file = JsonLinesFile(str(path))
    file.append([b"first"])
    real, calls = os.write, []

    def write(handle, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(handle, bytes(data)[:4])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr("midstream.sinks.events.json_lines.os.write", write)
    with pytest.raises(OSError, match="No space left"):
        file.append([b"second", b"third"])
    assert path.read_text() == "first\n"
    file.append([b"second", b"third"])
    assert path.read_text() == "first\nsecond\nthird\n"
    file.close()


@pytest.mark.parametrize(("fsync", "times"), [("batch", 2), ("never", 0)])
def test_a_batch_is_on_the_disk_before_it_counts_if_that_is_asked(
    tmp_path, monkeypatch, fsync, times
):
    synced = []
    monkeypatch.setattr("midstream.sinks.events.json_lines.os.fsync", synced.append)
    sink = JsonLinesSink(JsonLinesSettings(path=str(tmp_path / "x"), fsync=fsync))
    sink.send([], 1.0)
    sink.send([], 1.0)
    sink.close()
    assert len(synced) == times


def test_a_lock_that_another_process_holds_is_waited_for_in_time(tmp_path):
    path = str(tmp_path / "events.jsonl")
    first, second = JsonLinesFile(path), JsonLinesFile(path)
    with first._locked(1.0):
        with pytest.raises(TimeoutError, match="locked for 0.1 s"):
            second.append([b"x"], 0.1)
        waits = threading.Thread(target=second.append, args=([b"y"], 30.0))
        waits.start()
    waits.join(30)
    assert Path(path).read_text() == "y\n"


def test_a_file_that_was_moved_away_is_made_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    file = JsonLinesFile(str(path))
    file.append([b"first"])
    path.rename(tmp_path / "moved")
    file.append([b"second"])
    assert path.read_text() == "second\n"


def test_what_is_no_regular_file_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        JsonLinesFile(str(tmp_path / "pipe"))
    with pytest.raises(FileNotFoundError):
        JsonLinesFile(str(tmp_path / "missing" / "x"))
