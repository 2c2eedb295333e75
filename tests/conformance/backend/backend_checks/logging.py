"""The server's log."""

from __future__ import annotations

from typing import Any

from .expecting import refused, same


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


def check_levels_are_an_enumeration(pb_utils: Any, request: Any) -> None:
    levels = pb_utils.Logger.LogLevel
    same(list(levels.__members__), ["INFO", "WARNING", "ERROR", "VERBOSE"])
    same(repr(pb_utils.Logger.VERBOSE), "<LogLevel.VERBOSE: 3>")
    assert pb_utils.Logger.WARNING == 1


def check_a_level_is_no_number(pb_utils: Any, request: Any) -> None:
    for level in (2, None, "ERROR"):
        refused(TypeError, None, pb_utils.Logger.log, "a line", level)


def check_a_line_is_a_text(pb_utils: Any, request: Any) -> None:
    for message in (None, 7, ValueError("x"), "\ud800"):
        refused(TypeError, None, pb_utils.Logger.log_info, message)
    pb_utils.Logger.log_info(b"bytes \xff")


def check_nobody_makes_a_logger(pb_utils: Any, request: Any) -> None:
    refused(TypeError, "c_python_backend_utils.Logger: No constructor defined!", pb_utils.Logger)
