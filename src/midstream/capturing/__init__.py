"""Data sets through an engine, and what was captured into a store: the job of `midstream capture`.

Needs no command line: `capture_dataset(Job(model=…, data=…, out=…, capture=Capture(…)))`.
"""

from midstream.capturing.job import Job
from midstream.capturing.run import Capturing, Counts, Summary, Watch, capture_dataset

__all__ = ["Capturing", "Counts", "Job", "Summary", "Watch", "capture_dataset"]
