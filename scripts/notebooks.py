"""Execute the notebooks of examples/notebooks, and store their outputs in them.

All run in one kernel, where `LLM(…)` returns one engine, except those that start an `AsyncLLM`.
A notebook whose outputs belong to its code already is left as it is, unless it is named. Outputs
are stored without log lines, progress bars and what differs by machine. With `--table`, a table of
the lines of each notebook is printed instead.

    python scripts/notebooks.py [--table] [names …]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support import notebooks  # noqa: E402


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Run the command line."""
    from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

    named = [one for one in arguments if one != "--table"]
    unknown = set(named) - {path.stem for path in notebooks.PATHS}
    if unknown:
        sys.exit(f"unknown notebooks: {', '.join(sorted(unknown))}")
    if "--table" in arguments:
        for path in notebooks.PATHS:
            found = notebooks.read(path)
            lines = notebooks.midstream_lines(found), notebooks.all_lines(found)
            say(f"{path.stem:20} {lines[0]:3} lines, {lines[1]:3} with plain cells")
        return
    model = make_smollm2(Path(os.environ.get("MIDSTREAM_MODELS", ROOT / ".models")) / NAME)
    with tempfile.TemporaryDirectory() as folder:
        hub = notebooks.hub_cache(Path(folder), model)
        chosen = []
        for path in notebooks.PATHS:
            found = notebooks.read(path)
            stored = found.metadata.get("midstream", {}).get("source")
            if path.stem in named if named else stored != notebooks.source_hash(found):
                chosen.append(path)
        offline = [path for path in chosen if path.stem not in notebooks.ASYNC]
        for group in [offline, *([path] for path in chosen if path.stem in notebooks.ASYNC)]:
            if group:
                run(group, hub)


def run(paths: list[Path], hub: Path) -> None:
    """Execute notebooks in one kernel, and store them."""
    with notebooks.kernel(hub) as started:
        notebooks.share_engine(started)
        for path in paths:
            began, found = time.monotonic(), notebooks.read(path)
            notebooks.execute(found, started)
            notebooks.store(found, path)
            notebooks.forget(started)
            size = path.stat().st_size // 1000
            say(f"{path.name}: {time.monotonic() - began:.0f} s, {size} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
