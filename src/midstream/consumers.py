"""Capture requests by sink as dataclasses; an alias of `midstream.compat.consumers`."""

from midstream.compat.consumers import FilesystemCaptureRequest

__all__ = ["FilesystemCaptureRequest"]
