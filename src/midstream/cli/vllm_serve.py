"""vLLM's command `serve` for builds of other package names, whose version vLLM fails to read."""

from __future__ import annotations

import os


def main() -> None:
    """Run `serve` with this process's arguments."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # As vLLM's own command does before it reads its arguments.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = FlexibleArgumentParser(description="vLLM's server")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args()
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
