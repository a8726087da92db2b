"""A server in separate processes, started by `midstream serve`, and ended by its id."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from support import own_process, zygote
from support.engines import GPU_MEMORY

NAME = "served"
START_SECONDS = 420
# What makes rows comparable bit by bit with those of an offline engine, and a start short. On a GPU
# graphs are on, and several servers share it.
ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "block_size": 32, "max_num_seqs": 64,
    "enable_prefix_caching": False, "seed": 0,
    # vLLM sets all blocks to zero at the start, and a GiB of them takes half a second.
    **(GPU_MEMORY or {"enforce_eager": True, "num_gpu_blocks_override": 256}),
}  # fmt: skip


def options_of(engine: dict[str, Any]) -> tuple[str, ...]:
    """Arguments of an engine as options of a server."""
    named = {name.replace("_", "-"): value for name, value in engine.items()}
    return tuple(
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in named.items()
    )


OPTIONS = (*options_of(ENGINE), f"--served-model-name={NAME}", "--host=127.0.0.1")


class Running:
    """One server.

    Attributes:
        url: where it answers, without `/v1`.
        process: the one that was started: the API server's.
    """

    def __init__(self, url: str, process: own_process.Process, log: Path) -> None:
        self.url = url
        self.process = process
        self._log = log
        # One for all: to make one takes as long as a request. It keeps no connection open.
        self._http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def log(self) -> str:
        """Return the log of all processes."""
        return self._log.read_text(errors="replace")

    @property
    def engine(self) -> int:
        """The id of the engine's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        [pid] = [one.pid for one in children if "EngineCore" in one.name() or _is_core(one)]
        return pid

    @property
    def tree(self) -> list[psutil.Process]:
        """All of its processes."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def memory(self) -> list[int]:
        """Bytes of memory that each of its processes has for itself, by their ids. The arena is not
        among them: it is shared, and has a budget.
        """
        found = (one.memory_info() for one in sorted(self.tree, key=lambda one: one.pid))
        return [one.rss - one.shared for one in found]

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._http.get(self.url + path).raise_for_status().json()

    def text(self, path: str) -> str:
        """The text at a path."""
        return self._http.get(self.url + path, follow_redirects=True).raise_for_status().text

    def is_healthy(self) -> bool:
        """Whether it answers that it runs."""
        return self._http.get(f"{self.url}/health", timeout=5).status_code == 200

    def status(self) -> dict[str, Any]:
        """What `/v1/midstream/status` says."""
        found: dict[str, Any] = self.get("/v1/midstream/status")
        return found

    def wait_until_idle(self) -> dict[str, Any]:
        """Its status once nothing runs, waits or is leased; the last one, if that never comes."""
        end = time.monotonic() + 60
        while True:
            status = self.status()
            leases = sum(one["arena"]["leases"] for one in status["workers"])
            if not status["requests"] + status["waiting"] + leases or time.monotonic() > end:
                return status
            time.sleep(0.02)

    def stop(self, seconds: float = 90) -> int:
        """Ends it as an operator would; its exit status."""
        self._http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                for one in self.tree:
                    one.kill()


def _is_core(process: psutil.Process) -> bool:
    # vLLM gives its processes titles where setproctitle is installed.
    return any("EngineCore" in word for word in process.cmdline())


def command(model: Path, *options: str) -> list[str]:
    """Python's arguments that start a server with midstream."""
    return ["-m", "midstream", "serve", str(model), *OPTIONS, *options]


def plain_command(model: Path, *options: str) -> list[str]:
    """Python's arguments that start one without."""
    server = "vllm.entrypoints.openai.api_server"
    return ["-m", server, "--model", str(model), *OPTIONS, *options]


def environment(**more: str) -> dict[str, str]:
    """In which a server is started."""
    path = zygote.python_path()  # it runs elsewhere
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    own["VLLM_LOGGING_LEVEL"] = "INFO"
    # Otherwise glibc takes large tensors from its heap as well, which then grows with any load for
    # minutes and tells nothing of what is kept.
    own["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)
    return {**os.environ, **own, "PYTHONPATH": path, **more}


@contextmanager
def running(
    arguments: list[str],
    folder: Path,
    *,
    port: int | None = None,
    fresh: bool = False,
    **env: str,
) -> Iterator[Running]:
    """A server that answers, until the block ends."""
    port = port or free_port()
    log = folder / f"server-{port}.log"
    with log.open("wb") as file:
        process = own_process.start(
            *arguments,
            f"--port={port}",
            fresh=fresh,
            cwd=folder,
            env=environment(**env),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    server = Running(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server)
        yield server
    finally:
        server.stop()


def _wait(server: Running) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            if server.is_healthy():
                return
        except httpx.TransportError:
            pass
        assert server.process.poll() is None, f"it ended: {server.log[-6000:]}"
        assert time.monotonic() < end, f"it does not answer: {server.log[-6000:]}"
        time.sleep(0.05)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def settings(**given: Any) -> str:
    """midstream's settings as an option."""
    return f"--settings={json.dumps(given)}"
