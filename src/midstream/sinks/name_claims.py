"""Names that running requests have taken in a sink, so that no two store rows under one name."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from midstream.errors import BusyError, ExistsError
from midstream.sinks.daemon_threads import OrderedCalls
from midstream.validation import at, show

TAKE_SECONDS = 5.0  # longest time in which a file system answers
# For which an event loop waits, so that others may take a name as soon as it was given back.
_GIVE_SECONDS = 0.01
_RETRY_SECONDS = 10

_LOGGER = logging.getLogger(__name__)
_RECORD = struct.Struct("hhqqi4x")  # `struct flock`: type, whence, start, length, process
_TAKEN = (errno.EACCES, errno.EAGAIN)
# Of file systems that have no locks of single bytes.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class NameClaims:
    """The taken names of one sink, for all processes: locked bytes of a file, which the kernel
    unlocks. Locked in a thread of its own, as the file system may not answer. Thread-safe.
    """

    def __init__(self, path: str) -> None:
        """Create the claims, by locked bytes of a file, which is created with the first name."""
        self._path = path
        self._file: int | None = None
        self._has_locks = True
        self._users: dict[str, int] = {}
        self._lock = threading.Lock()
        self._calls = OrderedCalls()
        self._hanging: Future[bool] | None = None

    def take(self, name: str) -> bool:
        """Take a name; return False if another request has it. BusyError: no answer in time."""
        with self._lock:
            if name in self._users:
                return False
            self._check_answers()
            self._users[name] = 1
        locked = self._calls.put(partial(self._set, fcntl.F_WRLCK, name))
        is_taken = False
        try:
            if not wait((locked,), TAKE_SECONDS).done:
                self._hanging = locked
                self._check_answers()
            is_taken = locked.result(0)
        finally:
            if not is_taken:
                with self._lock:
                    del self._users[name]
                    if not locked.done():
                        # It may be locked later, and is unlocked then.
                        self._calls.put(partial(self._set, fcntl.F_UNLCK, name))
        return is_taken

    def _check_answers(self) -> None:
        if self._hanging is not None and not self._hanging.done():
            raise BusyError(f"{self._path} does not answer: nothing is stored", _RETRY_SECONDS)

    def keep_until(self, done: Future[Any], name: str) -> None:
        """Keep a taken name at least until a future is done. Does nothing if it is not taken."""
        with self._lock:
            if name not in self._users:
                return
            self._users[name] += 1
        done.add_done_callback(lambda _: self.give(name))

    def give(self, name: str) -> None:
        """Give a name back: others may take it once nothing else keeps it."""
        with self._lock:
            self._users[name] -= 1
            if self._users[name]:
                return
            del self._users[name]
            unlocked = self._calls.put(partial(self._set, fcntl.F_UNLCK, name))
        wait((unlocked,), _GIVE_SECONDS)

    def close(self) -> None:
        closed = self._calls.put(self._close)
        self._calls.close()
        wait((closed,), TAKE_SECONDS)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._has_locks = None, False

    def _set(self, kind: int, name: str) -> bool:
        """Lock or unlock the byte of a name; return False if another process has it locked."""
        if not self._has_locks:
            return True
        if self._file is None:
            try:
                self._file = _open(self._path)
            except PermissionError as error:
                self._go_without(error)
                return True
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little") >> 2
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _RECORD.pack(kind, os.SEEK_SET, start, 1, 0))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self._go_without(error)
        return True

    def _go_without(self, error: OSError) -> None:
        """Compare names within this process only from now on."""
        self._has_locks = False
        _LOGGER.warning(
            "%s cannot be locked (%s): the ids of captures are compared with those of requests of "
            "this process only, not of others that write to the same place",
            self._path,
            error.strerror,
        )


def _open(path: str) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        file_stat, folder = os.fstat(file), os.stat(os.path.dirname(path))
        if not stat.S_ISREG(file_stat.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", path)
        if file_stat.st_uid == os.geteuid():
            # Whoever may write to the folder may lock; in one for everybody's files, nobody else.
            writers = 0 if folder.st_mode & stat.S_ISVTX else folder.st_mode & 0o022
            os.fchmod(file, 0o600 | writers | writers << 1)
    except BaseException:
        os.close(file)
        raise
    return file


@dataclass(frozen=True, slots=True)
class NamedCapture:
    """A capture whose rows the caller has named."""

    index: int  # among the captures of the plan
    names: NameClaims
    name: str  # what no other request may have taken
    request_id: str
    check: Callable[[], None]  # raises ExistsError if the sink stores rows of the name already


class RequestNames:
    """The names of one request's captures, taken until its rows are in the queues of its sinks."""

    def __init__(self, captures: Sequence[NamedCapture]) -> None:
        self._captures = captures
        self._taken: list[NamedCapture] = []
        self._is_over = False
        self._lock = threading.Lock()

    def take(self) -> None:
        """Take the names. Reads what the sinks store already, so not on an event loop."""
        try:
            for capture in self._captures:
                with at(f"capture[{capture.index}]"):
                    self._take(capture)
        except BaseException:
            self.release()
            raise

    def _take(self, named: NamedCapture) -> None:
        if not named.names.take(named.name):
            raise ExistsError(
                "request_id",
                f"a running request stores rows under the id {show(named.request_id)}; use another "
                "id, for each prompt its own",
            )
        with self._lock:
            if self._is_over:
                named.names.give(named.name)
                return
            self._taken.append(named)
        # Only now: nobody else can store rows of this name any more.
        named.check()

    def release(self) -> None:
        """Give the names back. `take`, if it runs in a thread meanwhile, gives back the rest."""
        with self._lock:
            self._is_over = True
            taken, self._taken = self._taken, []
        for capture in taken:
            capture.names.give(capture.name)
