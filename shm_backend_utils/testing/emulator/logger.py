"""The server's log."""

from __future__ import annotations

from typing import Final

from .arguments import refuse, text
from .enums import NumberedEnum
from .host import Host

__all__ = ["LogLevel", "Logger"]


class LogLevel(NumberedEnum):
    """How much a line of the log matters."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_Level = LogLevel


class Logger:
    """The server's log, from Triton 22.09 on. Lines have the place in model.py where they were written."""

    _host: Host

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.Logger: No constructor defined!")

    LogLevel: Final = _Level
    INFO: Final = _Level.INFO
    WARNING: Final = _Level.WARNING
    ERROR: Final = _Level.ERROR
    VERBOSE: Final = _Level.VERBOSE

    @classmethod
    def log(cls, message: str, level: _Level = _Level.INFO) -> None:
        """Write a line."""
        if not isinstance(level, _Level):
            refuse("log", "level", level, "a LogLevel")
        cls._host.log(level.name, text("log", "message", message))

    @classmethod
    def log_info(cls, message: str) -> None:
        """Write a line of information."""
        cls._host.log("INFO", text("log_info", "message", message))

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Write a warning."""
        cls._host.log("WARNING", text("log_warn", "message", message))

    @classmethod
    def log_error(cls, message: str) -> None:
        """Write an error."""
        cls._host.log("ERROR", text("log_error", "message", message))

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Write a line that is seen with ``--log-verbose`` alone."""
        cls._host.log("VERBOSE", text("log_verbose", "message", message))
