"""The private folder of a server's processes: made once, found by children only, removed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.config.server_folder import VARIABLE, own_folder
from midstream.errors import ConfigError

PARENT = """
import os, stat, subprocess, sys
from midstream.config.server_folder import VARIABLE, make_folder
make_folder()
first = os.environ[VARIABLE]
make_folder()
assert os.environ[VARIABLE] == first
child = "from midstream.config.server_folder import own_folder; print(own_folder())"
folder = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
print(folder.stdout.strip(), oct(stat.S_IMODE(os.stat(folder.stdout.strip()).st_mode)))
"""
LEFT = """
import os, subprocess, sys
from midstream.config.server_folder import VARIABLE, make_folder
make_folder()
print(os.environ[VARIABLE].partition(":")[2], flush=True)
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
os._exit(1)
"""


@pytest.mark.engine  # starts processes
def test_children_find_it_and_it_goes_with_the_process_that_made_it():
    environment = {**os.environ, VARIABLE: f"{os.getpid()}:/another/server's"}
    done = subprocess.run(
        [sys.executable, "-c", PARENT], env=environment, capture_output=True, text=True, check=True
    )
    folder, mode = done.stdout.split()
    assert mode == oct(stat.S_IRWXU)
    assert not Path(folder).exists()


@pytest.mark.engine  # starts processes
def test_what_a_killed_process_has_left_its_children_remove():
    child = (
        "import time; from midstream.config.server_folder import remove_if_left\n"
        "time.sleep(0.2); remove_if_left(); print('removed')"
    )
    done = subprocess.run(
        [sys.executable, "-c", LEFT, child], capture_output=True, text=True, check=False
    )
    folder, removed = done.stdout.split()
    assert removed == "removed"
    assert not Path(folder).exists()


@pytest.mark.parametrize("value", ["", f"{os.getppid() + 1}:/tmp", f"{os.getppid()}:/not/there"])
def test_another_process_folder_is_not_taken(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match="did not load midstream"):
        own_folder()
