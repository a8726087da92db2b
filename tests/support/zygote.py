"""A process that has imported torch and vLLM; its forked children start at once.

`start` runs a program of Python in such a child, with arguments, environment, folder and streams of
its own, as `subprocess.Popen` would run `python ARGUMENTS`. A fresh interpreter takes eight seconds
for these imports. Not for tests of how a process starts, nor for a GPU, which a fork cannot use.

The processes of one run of tests share it, where pytest-xdist says which run this is. A fork of it
that has imported vLLM and nothing of midstream serves too.

    python -m support.zygote PATH NUMBER   serves those who connect to its standard input, a socket
                                           that listens at this path, until the last of them has
                                           left; the descriptor NUMBER is the socket of the other
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
# Of a process that forks: libraries start no threads, and vLLM looks for nothing outside.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "MIDSTREAM_TEST_FORKS": "1",
}
_LENGTH = 8
_DESCRIPTORS = 16  # at most, of one program
_VLLM = "-vllm"  # ends the path of the zygote that has nothing of midstream


# ---------------------------------------------------------------- the client's side


class Child:
    """A process forked from the zygote; has what tests use of `subprocess.Popen`."""

    def __init__(
        self, pid: int, link: socket.socket, out: IO[Any] | None, error: IO[Any] | None
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = out, error
        self._link = link

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status."""
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout or 0)
            self.returncode = int(_receive(self._link)["status"])
            self._link.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read its pipes to their ends, wait, and return (stdout, stderr)."""
        end = None if timeout is None else time.monotonic() + timeout
        pipes = {pipe.fileno(): pipe for pipe in (self.stdout, self.stderr) if pipe is not None}
        found: dict[int, list[bytes]] = {number: [] for number in pipes}
        open_ = set(pipes)
        while open_:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = select.select(list(open_), [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout or 0)
            for number in ready:
                data = os.read(number, 1 << 16)
                found[number].append(data)
                open_ -= set() if data else {number}
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        texts = []
        for pipe in (self.stdout, self.stderr):
            data = None if pipe is None else b"".join(found[pipe.fileno()])
            is_text = pipe is not None and hasattr(pipe, "encoding")
            texts.append(data.decode(errors="replace") if data is not None and is_text else data)
            if pipe is not None:
                pipe.close()
        return texts[0], texts[1]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_error: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def start(
    arguments: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    kept: Sequence[int] = (),
    has_midstream: bool = True,
) -> Child:
    """Run `python ARGUMENTS` in a child of the zygote, which is made when there is none yet. It has
    the file descriptors `kept` by the same numbers, and has imported midstream or vLLM alone.
    """
    link, theirs = socket.socketpair()
    reads: list[IO[Any] | None] = []
    passed: list[int] = []
    opened: list[int] = []
    for given in (1 if stdout is None else stdout, 2 if stderr is None else stderr):
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            reads.append(os.fdopen(reading) if text else os.fdopen(reading, "rb", 0))
            opened.append(writing)
            passed.append(writing)
        elif given == subprocess.DEVNULL:
            opened.append(os.open(os.devnull, os.O_WRONLY))
            passed.append(opened[-1])
            reads.append(None)
        elif given == subprocess.STDOUT:
            passed.append(passed[0])
            reads.append(None)
        else:
            passed.append(given if isinstance(given, int) else given.fileno())
            reads.append(None)
    wanted = {
        "arguments": [str(each) for each in arguments],
        "cwd": str(cwd or os.getcwd()),
        "env": dict(os.environ if env is None else env),
        "kept": list(kept),
    }
    control = _zygote() if has_midstream else _zygote_of_vllm()
    socket.send_fds(control, [b"+"], [theirs.fileno(), *passed, *kept])
    theirs.close()
    for number in opened:
        os.close(number)
    _send(link, wanted)
    return Child(int(_receive(link)["pid"]), link, reads[0], reads[1])


def python_path() -> str:
    """Return where Python finds the tests' support and the package: that of PYTHONPATH where it is
    set, as a build that is broken on purpose is.
    """
    given = os.environ.get("PYTHONPATH") or str(ROOT / "src")
    path = [str(ROOT / "tests"), *map(os.path.abspath, given.split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(path))


@functools.cache
def _zygote() -> socket.socket:
    """Return this process's connection to the zygote."""
    path = _path()
    mine = socket.socket(socket.AF_UNIX)
    process: subprocess.Popen[bytes] | None = None
    with _locked():
        try:
            mine.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            process = _start_zygote(path)
            mine.connect(path)

    def close() -> None:
        mine.close()
        if process is not None and "PYTEST_XDIST_TESTRUNUID" not in os.environ:
            process.wait()

    atexit.register(close)
    return mine


@functools.cache
def _zygote_of_vllm() -> socket.socket:
    """Return this process's connection to the zygote that has nothing of midstream."""
    _zygote()  # which makes the other
    mine = socket.socket(socket.AF_UNIX)
    mine.connect(_path() + _VLLM)
    atexit.register(mine.close)
    return mine


def _path() -> str:
    """Return where this run's zygote listens."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    return os.path.join(tempfile.gettempdir(), f"midstream-zygote-{run}")


def _start_zygote(path: str) -> subprocess.Popen[bytes]:
    with _listening(path) as listener, _listening(path + _VLLM) as other:
        return subprocess.Popen(
            [sys.executable, "-m", "support.zygote", path, str(other.fileno())],
            stdin=listener,
            pass_fds=[other.fileno()],
            env={**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": python_path()},
        )


def _listening(path: str) -> socket.socket:
    """Return a socket that listens at a path."""
    Path(path).unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX)
    found.bind(path)
    found.listen()
    return found


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Nobody else connects to a zygote, and none ends, in the block."""
    name = f"midstream-zygote-{os.getuid()}.lock"
    with open(os.path.join(tempfile.gettempdir(), name), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _send(link: socket.socket, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    link.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def _receive(link: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(_exactly(link, _LENGTH), "little")
    found: dict[str, Any] = json.loads(_exactly(link, size))
    return found


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise ConnectionError("the zygote has ended")
        data += more
    return data


# ---------------------------------------------------------------- the zygote's side


@dataclass
class Forked:
    """A child that runs: where its end is told, and the client whose it is."""

    link: socket.socket
    client: socket.socket


def serve(listener: socket.socket, path: str) -> None:
    """Fork a child for each request of the clients, and report each one's end. A client's children
    end with it.
    """
    children: dict[int, Forked] = {}
    clients: list[socket.socket] = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([listener, reading, *clients], [], [])[0]
        if reading in ready:
            os.read(reading, 1 << 12)
        _reap(children)
        for control in [one for one in clients if one in ready]:
            word, handles, *_ = socket.recv_fds(control, 1, _DESCRIPTORS)
            if word:
                others = [listener, *clients, *(child.link for child in children.values())]
                _fork(control, handles, children, [reading, writing], others)
                continue
            clients.remove(control)
            for pid in [pid for pid, child in children.items() if child.client is control]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            control.close()
            if not clients and _ends(listener, path):
                return
        if listener in ready:
            clients.append(listener.accept()[0])


def _ends(listener: socket.socket, path: str) -> bool:
    """Return whether nobody has connected meanwhile; then nobody does any more."""
    with _locked():
        if select.select([listener], [], [], 0)[0]:
            return False
        Path(path).unlink(missing_ok=True)
        return True


def _fork(
    client: socket.socket,
    handles: list[int],
    children: dict[int, Forked],
    pipe: list[int],
    sockets: list[socket.socket],
) -> None:
    """Fork a child, which has none of these sockets nor the pipe."""
    link = socket.socket(fileno=handles[0])
    wanted = _receive(link)
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (link, *sockets):
            other.close()
        for number in pipe:
            os.close(number)
        _run(wanted, *handles[1:])
    for number in handles[1:]:
        os.close(number)
    children[pid] = Forked(link, client)
    _send(link, {"pid": pid})


def _reap(children: dict[int, Forked]) -> None:
    """Report the children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        child = children.pop(pid, None)
        if child is not None:
            with contextlib.suppress(OSError):
                _send(child.link, {"status": os.waitstatus_to_exitcode(status)})
            child.link.close()


def _run(wanted: dict[str, Any], out: int, error: int, *kept: int) -> None:
    """Be the program; never returns."""
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, 1 << 8) for number in kept]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    for number in {nothing, out, error} - {0, 1, 2}:
        os.close(number)
    for number, wanted_number in zip(aside, wanted["kept"], strict=True):
        os.dup2(number, wanted_number)
        os.close(number)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    path = [each for each in wanted["env"].get("PYTHONPATH", "").split(os.pathsep) if each]
    own = os.path.dirname(os.path.abspath(wanted["arguments"][0]))
    sys.path[:] = list(dict.fromkeys([own, *path, *sys.path]))
    status, arguments = 0, wanted["arguments"]
    try:
        if "support.preloaded" in sys.modules:
            sys.modules["support.preloaded"].log_anew()
        os.execv = _execv
        while arguments:
            try:
                arguments = _run_once(*arguments)
            except _AnotherProgramError as other:
                arguments = other.arguments
    except SystemExit as error_:
        status = _status_of(error_)
    except BaseException:  # noqa: BLE001 - as Python does
        import traceback

        traceback.print_exc()
        status = 1
    _leave(status)


class _AnotherProgramError(BaseException):
    """The program is to be replaced by another."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self.arguments = arguments


def _execv(path: str, words: list[str]) -> None:
    """Replace the program by another one of Python's, in the same interpreter."""
    assert path == words[0] == sys.executable, words
    raise _AnotherProgramError(words[1:])


def _run_once(first: str, *rest: str) -> list[str]:
    """Run `python FIRST REST…`; nothing is to be run after it."""
    if first == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        _run_text(rest[0], "<string>")
    else:
        sys.argv = [first, *rest]
        _run_text(Path(first).read_text(), first)
    return []


def _run_text(text: str, file: str) -> None:
    """Run the text of a file as `__main__`."""
    import types

    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": file, "__builtins__": __builtins__})
    sys.modules["__main__"] = main
    exec(compile(text, file, "exec"), main.__dict__)


def _status_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def _leave(status: int) -> None:
    """End as Python ends: threads are waited for, and what is registered for the end is run."""
    import threading

    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _serve_too(listener: socket.socket, path: str, *closed: socket.socket) -> socket.socket:
    """Serve in a fork with what is imported now, which has none of these sockets, until this
    process and all others have left; return this one's connection.
    """
    mine = socket.socket(socket.AF_UNIX)
    mine.connect(path)
    if os.fork():
        listener.close()
        return mine
    for other in (mine, *closed):
        other.close()
    os.close(0)
    serve(listener, path)
    os._exit(0)


def main() -> None:
    listener, other = (socket.socket(fileno=number) for number in (os.dup(0), int(sys.argv[2])))
    from support import preloaded_vllm  # noqa: F401 - imports what the children need

    kept = _serve_too(other, sys.argv[1] + _VLLM, listener)
    from support import preloaded  # noqa: F401 - and this what most of them need

    serve(listener, sys.argv[1])
    kept.close()
    os._exit(0)


if __name__ == "__main__":
    main()
