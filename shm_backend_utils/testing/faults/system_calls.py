"""System calls that fail, and Ctrl+C between any two steps of the interpreter."""

from __future__ import annotations

import dis
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple

__all__ = ["CALLS", "Failing", "Fault", "Interrupts"]

CALLS: Final[dict[str, tuple[ModuleType, str]]] = {
    "open": (os, "open"),
    "posix_fallocate": (os, "posix_fallocate"),
    "fchmod": (os, "fchmod"),
    "fstat": (os, "fstat"),
    "link": (os, "link"),
    "unlink": (os, "unlink"),
    "fcntl": (fcntl, "fcntl"),
    "mmap": (mmap, "mmap"),
    "madvise": (mmap, "mmap"),
}
"""Calls that can fail, with Python's module and name: only calls through these modules fail."""

INTERRUPT: Final = 0
"""Instead of an error's number: the call raises KeyboardInterrupt, as if Ctrl+C had interrupted it."""

_NEVER: Final = {"PUSH_EXC_INFO", "POP_EXCEPT", "WITH_EXCEPT_START", "NOP"}
"""No handler runs before these. The compiler leaves the NOP of a `try` outside of what the `try` protects."""
_ENDS_OF_WITH: Final = (  # ``__exit__`` is called with three times None
    ["LOAD_CONST", "LOAD_CONST", "LOAD_CONST", "CALL"],
    ["LOAD_CONST", "DUP_TOP", "DUP_TOP", "CALL_FUNCTION"],
)


class Fault(NamedTuple):
    """A call that fails."""

    call: str  # one of :data:`CALLS`
    after: int  # how many such calls succeed before
    error: int  # the number of the error, of :mod:`errno`; or :data:`INTERRUPT`
    times: int = 1  # how many such calls fail then

    def raised(self) -> BaseException:
        """Return the call's error."""
        if self.error == INTERRUPT:
            return KeyboardInterrupt()
        return OSError(self.error, os.strerror(self.error))


class Failing:
    """A context manager in which a fault happens, in this process."""

    def __init__(self, fault: Fault) -> None:
        if fault.call not in CALLS:
            raise ValueError(f"call {fault.call!r} cannot be made to fail; expected one of {', '.join(CALLS)}")
        self._fault = fault
        self._left = fault.after
        self._module, self._name = CALLS[fault.call]
        self._real: Any = None
        self.has_happened = False  # whether a call has failed

    def __enter__(self) -> Failing:
        self._real = getattr(self._module, self._name)  # maybe another fault's
        setattr(self._module, self._name, self._mapping() if self._fault.call == "madvise" else self._wrapped())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        setattr(self._module, self._name, self._real)

    def _wrapped(self) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._pass()
            return self._real(*arguments, **named)

        return call

    def _mapping(self) -> type[mmap.mmap]:
        failing = self

        class Mapping(mmap.mmap):
            def madvise(self, *arguments: int) -> None:
                failing._pass()
                super().madvise(*arguments)

        return Mapping

    def _pass(self) -> None:
        self._left -= 1
        if -self._fault.times <= self._left < 0:
            self.has_happened = True
            raise self._fault.raised()


class Interrupts:
    """KeyboardInterrupts at bytecodes of some files, in the calling thread."""

    def __init__(self, *places: Path) -> None:
        self._files = tuple(f"{place}/" if place.is_dir() else f"{place}" for place in places)
        self._found: dict[CodeType, set[int]] = {}
        self.where = ""  # file, line and function of the last interrupt; empty if the work came to its end without one

    def at(self, number: int, work: Callable[[], object]) -> bool:
        """Do work, interrupted before bytecode ``number``, from 1 on; return whether it raised KeyboardInterrupt."""
        count, self.where = 0, ""

        def look(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            code = frame.f_code
            if not code.co_filename.startswith(self._files):
                return None
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = look, False, True  # in this order, for 3.13
            if event == "opcode" and frame.f_lasti not in self._uninterrupted(code):
                count += 1
                if count == number:
                    self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {frame.f_lasti}"
                    raise KeyboardInterrupt
            return look

        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # else Python 3.12.1 traces no bytecode
        sys.settrace(look)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _uninterrupted(self, code: CodeType) -> set[int]:
        if code not in self._found:
            self._found[code] = _uninterrupted(code)
        return self._found[code]


def _uninterrupted(code: CodeType) -> set[int]:
    """Return the bytecodes before which no signal raises: where an `except` begins and ends, and a `with` ends."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE")]
    found = {step.offset for step in steps if step.opname in _NEVER}
    for index, step in enumerate(steps):
        end = steps[index : index + 4]
        if [each.opname for each in end] in _ENDS_OF_WITH and step.argval is None:
            begin = steps[index - 1] if steps[index - 1].opname in ("SWAP", "ROT_TWO", "POP_BLOCK") else step
            found.update(range(begin.offset, end[-1].offset + 1))
    return found
