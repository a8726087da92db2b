"""The classes of midstream's commands: arguments that all of them read alike, and their help."""

from __future__ import annotations

import os
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# What people type that is no command, and where it is.
_ELSEWHERE = {
    **dict.fromkeys(
        ("steer", "generate", "chat", "run", "complete"),
        "in Python, LLM(MODEL).generate(PROMPT, edits=Steer(vector, layer=14)); in a browser, "
        "`midstream studio MODEL`; on a server, `midstream serve MODEL --vectors NAME=FILE`",
    ),
    **dict.fromkeys(
        ("fit", "train", "direction", "directions"),
        "`midstream report MODEL --pairs FILE`, or in Python Directions.fit(llm, positive, "
        "negative)",
    ),
    **dict.fromkeys(
        ("probes", "score", "monitor"),
        "in Python, LLM(MODEL).generate(PROMPT, probes=Probe(vector, layer=14)); on a server, "
        "`midstream guard put NAME PROBE --above 2.0`",
    ),
    **dict.fromkeys(("plan", "estimate"), "`midstream capture MODEL … --estimate`"),
    "patch": "`midstream sweep MODEL PROMPT --source TEXT --metric METRIC`",
}


def whole(least: int = 1) -> Callable[[Any], int]:
    """Return the reader of an option that is a whole number, as `100000`, `1e5` or `100_000`."""

    def read(text: Any) -> int:
        try:
            number = Decimal(str(text))
        except InvalidOperation:
            number = Decimal("nan")
        if not number.is_finite() or number != int(number) or number < least:
            raise typer.BadParameter(
                f"expected a whole number of at least {least}, such as 2000 or 2e3, got {text!r}"
            )
        return int(number)

    return read


def _without_types(params: list[Any]) -> list[Any]:
    """Return parameters with no type named in the help for flags, which take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def as_argument(args: list[str], option: str, is_first: bool) -> list[str]:
    """Return arguments with the value of an option, such as `--model`, as the first or the last
    argument.
    """
    words, values, last = list[str](), list[str](), list[str]()
    rest = iter(args)
    for word in rest:
        if word == "--":
            last = [word, *rest]
            break
        name, equals, value = word.partition("=")
        if name != option:
            words.append(word)
        elif not equals and (value := next(rest, "")) == "":
            raise typer.BadParameter(f"{option}: expected a folder or a name")
        else:
            values.append(value)
    return [*values, *words, *last] if is_first else [*words, *last, *values]


def _check_folder(model: Any) -> None:
    """Refuse the path of a model's folder that does not exist, before anything is imported."""
    if isinstance(model, str) and model.startswith((".", "/", "~")) and not os.path.exists(model):
        raise typer.BadParameter(
            f"model: there is no folder {model!r}; expected a folder, or a name such as org/model"
        )


class Command(TyperCommand):
    """A sub-command, whose arguments MODEL and OUT may also be given as `--model` and `--out`.
    Without an argument that it needs, the error has the example of its help.
    """

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        for word, is_first in (("MODEL", True), ("OUT", False)):
            if any(word in (param.metavar or "") for param in arguments):
                args = as_argument(args, f"--{word.lower()}", is_first)
        try:
            left = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if type(error).__name__ == "MissingParameter" and not error.message:
                example = (self.help or "").partition("Example:")[1:]
                error.message = " ".join("".join(example).split())
            raise
        _check_folder(ctx.params.get("model"))
        return left


class CommandGroup(TyperGroup):
    """The command, or a group of sub-commands; of what is no command, it says where it is."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _ELSEWHERE and args[0] not in self.commands:
            ctx.fail(f"there is no command {args[0]!r}: {_ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)
