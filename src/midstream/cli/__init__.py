"""The command `midstream`; each sub-command is a module, here or in the lab. They import heavy
packages only when they run, as vLLM reads environment variables at import.
"""

from __future__ import annotations


def main() -> None:
    """Run the command with the process's arguments; exits with its status."""
    import sys

    from midstream.cli.app import app
    from midstream.errors import MissingExtraError

    try:
        app()
    except ModuleNotFoundError as error:
        missing = MissingExtraError.of(error, "this command")
        if missing is error and not isinstance(error, MissingExtraError):
            raise
        print(f"error: {missing}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
