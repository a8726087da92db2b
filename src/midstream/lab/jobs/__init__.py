"""Dataset captures, the jobs of `midstream capture`: prompts of a dataset in, a store out.

From Python: `capture_dataset(Job(model=…, data=…, out=…, capture=Capture(…)))`.
"""

from midstream.lab.jobs.job import Job
from midstream.lab.jobs.live import LiveRows
from midstream.lab.jobs.prompt_tokens import DocumentPart, PromptParts
from midstream.lab.jobs.run import CaptureRun, Counts, Summary, Watch, capture_dataset

__all__ = [
    "CaptureRun",
    "Counts",
    "DocumentPart",
    "Job",
    "LiveRows",
    "PromptParts",
    "Summary",
    "Watch",
    "capture_dataset",
]
