"""Requests to consumers of captures, as dataclasses: `SamplingParams(capture={"filesystem": …})`."""

from midstream.compat.consumers import FilesystemCaptureRequest

__all__ = ["FilesystemCaptureRequest"]
