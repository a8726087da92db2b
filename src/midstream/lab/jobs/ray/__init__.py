"""Dataset captures on a Ray cluster: `midstream capture … --ray`, and a step for Ray Data.

Needs `pip install "midstream[ray]"`. `RayCaptureRun(Job(…), Placement(…))` captures a dataset into
a store; `capture_dataset(ds, …)` returns a `ray.data.Dataset` for further steps.
"""

from midstream.lab.jobs.ray.dataset import capture_dataset
from midstream.lab.jobs.ray.placement import Placement
from midstream.lab.jobs.ray.run import RayCaptureRun

__all__ = ["Placement", "RayCaptureRun", "capture_dataset"]
