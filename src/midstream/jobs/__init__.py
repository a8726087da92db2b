"""Data sets through an engine, and what was captured into a store: the job of `midstream capture`.

Needs no command line: `capture_dataset(Job(model=…, data=…, out=…, capture=Capture(…)))`.
"""

from midstream.jobs.job import Job
from midstream.jobs.run import CaptureRun, Counts, Summary, Watch, capture_dataset

__all__ = ["CaptureRun", "Counts", "Job", "Summary", "Watch", "capture_dataset"]
