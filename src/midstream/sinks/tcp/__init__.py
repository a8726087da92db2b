"""The sink `tcp`: rows to readers on other hosts, through a bounded spool on disk.

A record, one delivery, is written to the spool, sent to a reader, and deleted when the reader
acknowledges it. Without an acknowledgement it is sent again, to the next reader, so readers drop
records whose id they know.
"""

from midstream.sinks.tcp.reader import Received, TcpRows
from midstream.sinks.tcp.sink import TcpSink

__all__ = ["Received", "TcpRows", "TcpSink"]
