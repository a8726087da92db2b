"""A process that is forked while a thread of its parent writes."""

import os
import signal
import threading

import pytest
from unit.store.making import entry, header

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Writer
from midstream.store.backends.local import LocalFolder


def test_in_a_forked_process_a_writer_that_is_writing_is_an_error_at_once(tmp_path, monkeypatch):
    writer = Writer(tmp_path, header())
    writer.add(entry("a"))
    begun, may_end = threading.Event(), threading.Event()
    put = LocalFolder.put
    monkeypatch.setattr(
        LocalFolder, "put", lambda *args: (begun.set(), may_end.wait(60), put(*args))[2]
    )
    thread = threading.Thread(target=writer.flush)
    thread.start()
    begun.wait(60)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends the child if it waits for the thread
        code = 1
        try:
            with pytest.raises(StoreError, match="the writer belongs to another process"):
                writer.add(entry("b"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_end.set()
    thread.join()
    assert [one.request for one in open_store(tmp_path).requests] == ["a"]
