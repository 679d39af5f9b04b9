"""Keeps a conversion for OpenVINO to one voice: its tools print nothing and report nothing."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def quiet_conversion() -> Iterator[None]:
    """Foreign progress bars, tables and tracer warnings are not the user's; nor is what is reported to their makers."""
    logger = logging.getLogger("nncf")
    level = logger.level
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), _unreported():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def _unreported() -> Iterator[None]:
    """A conversion reports some forty events over the network, each from a fork of the whole process."""
    try:
        from openvino_telemetry.utils.sender import TelemetrySender
    except ImportError:
        yield
        return
    send = TelemetrySender.send
    TelemetrySender.send = lambda *_: None
    try:
        yield
    finally:
        TelemetrySender.send = send
