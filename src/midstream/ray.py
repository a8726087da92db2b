"""Former location of `midstream.jobs.ray`, kept for one release."""

from midstream.jobs.ray import Placement as Spread
from midstream.jobs.ray import RayCaptureRun as Spreading
from midstream.jobs.ray import capture_dataset

__all__ = ["Spread", "Spreading", "capture_dataset"]
