"""The command `midstream`; each sub-command is a module of this folder.

Sub-commands import heavy packages only when they run: `--help` stays fast, and the environment
variables that vLLM reads at import can be set first.
"""

from __future__ import annotations


def main() -> None:
    """Run the command with the process's arguments; exits with its status."""
    from midstream.cli.app import app

    app()
