"""The command `midstream`. Each of its sub-commands is a module of this folder.

Nothing heavy is imported before a sub-command runs, so that `--help` is instant, and before the
environment is set, which vLLM reads when it is imported.
"""

from __future__ import annotations


def main() -> None:
    """Runs the command with the process's arguments; exits with its status."""
    from midstream.cli.app import app

    app()
