"""Bulk work on a Ray cluster: `midstream capture … --ray`, and captures as a step of Ray Data.

Needs `pip install "midstream[ray]"`. `RayCaptureRun(Job(…), Placement(…))` is a dataset capture into a
store; `capture_dataset(ds, …)` gives a `ray.data.Dataset` for whoever goes on from there.
"""

from midstream.jobs.ray.dataset import capture_dataset
from midstream.jobs.ray.placement import Placement
from midstream.jobs.ray.run import RayCaptureRun

__all__ = ["Placement", "RayCaptureRun", "capture_dataset"]
