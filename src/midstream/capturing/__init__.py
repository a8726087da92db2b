"""The former place of `midstream.jobs`, kept for one release."""

from midstream.jobs import CaptureRun as Capturing
from midstream.jobs import Counts, Job, Summary, Watch, capture_dataset

__all__ = ["Capturing", "Counts", "Job", "Summary", "Watch", "capture_dataset"]
