"""The server's log."""

from __future__ import annotations

from typing import Any


def check_every_level_has_a_function(pb_utils: Any, request: Any) -> None:
    logger = pb_utils.Logger
    for write in (logger.log, logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose):
        assert write("a ü line") is None
        assert write(message="a line") is None


def check_a_level_can_be_named(pb_utils: Any, request: Any) -> None:
    logger = pb_utils.Logger
    for level in (logger.INFO, logger.WARNING, logger.ERROR, logger.VERBOSE, logger.LogLevel.INFO):
        assert logger.log("a line", level) is None
        assert logger.log(message="a line", level=level) is None
