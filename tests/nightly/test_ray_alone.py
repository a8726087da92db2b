"""A job with a cluster of its own, in a process of its own, and what it leaves."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lab.jobs.checking import check_rows
from lab.jobs.fakes import prompts, texts, write_lines
from support.object_store import (
    bucket,  # noqa: F401
    object_client,  # noqa: F401
    object_server,  # noqa: F401
    s3,  # noqa: F401
)
from support.own_process import ROOT

pytestmark = pytest.mark.usefixtures("actors_find_the_tests")


ALONE = """
import sys
from pathlib import Path
from lab.jobs.fakes import job
from support.on_ray import Slow
from midstream.lab.jobs.ray import Placement, RayCaptureRun

folder = Path(sys.argv[1])
few = {"max_num_seqs": 4}
asked = job(folder, out=sys.argv[2], resume=True, flush_seconds=0.05, engine_args=few)
with RayCaptureRun(asked, Placement(address="local")) as spreading:
    print(spreading.work(Slow).counts.stored)
"""


def alone(folder: Path, out: str) -> subprocess.Popen[str]:
    """A job in a process of its own, with a cluster of its own."""
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH") or str(ROOT / "src")]
    return subprocess.Popen(
        [sys.executable, "-c", ALONE, str(folder), out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_cluster_that_was_made_for_a_job_ends_with_it(tmp_path, bucket):  # noqa: F811
    """Its engines are given the job's environment, and so find the object store."""
    write_lines(tmp_path, prompts(6))
    out = f"s3://{bucket}/acts"
    process = alone(tmp_path, out)
    said, err = process.communicate(timeout=200)
    assert (process.returncode, said.splitlines()[-1]) == (0, "6"), err
    check_rows(out, texts(6))
    assert _processes() == []
    assert list(tmp_path.glob("ms-ray-*")) == []


def _processes() -> list[list[str]]:
    """Those of clusters that were made for jobs."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any("ms-ray-" in word for word in each.cmdline()):
                found.append(each.cmdline())
    return found
