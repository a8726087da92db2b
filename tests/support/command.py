"""typer's runner of the command `midstream`, which is put together once in a process of tests."""

import functools
from typing import Any
from unittest import mock

import typer
from typer import testing

# It takes 30 ms for all sub-commands, and typer does it anew for each call.
_made = functools.cache(typer.main.get_command)


class CliRunner(testing.CliRunner):
    """Runs a command in this process."""

    def invoke(self, app: typer.Typer, *arguments: Any, **options: Any) -> testing.Result:
        with mock.patch.object(testing, "_get_command", _made):
            return super().invoke(app, *arguments, **options)
