"""What is raised for a prompt that an engine cannot take, by whatever name, as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from midstream.errors import SpecError


@contextmanager
def named_refusals() -> Iterator[None]:
    """What vLLM or a chat template raises of a prompt is raised as a SpecError; an engine that
    cannot go on is not.

    Raises:
        SpecError: the prompt cannot be taken.
    """
    from jinja2 import TemplateError
    from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

    try:
        yield
    except SpecError:
        raise
    except (ValueError, VLLMValidationError, VLLMUnprocessableEntityError) as error:
        raise SpecError("", str(error)) from error
    except (TypeError, LookupError, AttributeError, TemplateError) as error:
        # Of a template, or of vLLM, that gets something else than it expects.
        raise SpecError("", f"{type(error).__name__}: {error}") from error
