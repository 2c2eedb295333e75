"""Ctrl+C between any two steps of the interpreter."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

__all__ = ["Interrupts"]

_NEVER: Final = {"PUSH_EXC_INFO", "POP_EXCEPT", "WITH_EXCEPT_START", "NOP"}
"""No signal raises there. The compiler leaves the NOP of a `try` outside of what the `try` protects."""
_ENDS_OF_WITH: Final = (  # ``__exit__`` is called with three times None
    ["LOAD_CONST", "LOAD_CONST", "LOAD_CONST", "CALL"],
    ["LOAD_CONST", "DUP_TOP", "DUP_TOP", "CALL_FUNCTION"],
)


class Interrupts:
    """KeyboardInterrupts at bytecodes of some files, in the calling thread.

    Parameters
    ----------
    *places : pathlib.Path
        Files, and folders of files.

    Attributes
    ----------
    where : str
        File, line and function of the last interrupt; empty if the work came to its end without one.
    """

    def __init__(self, *places: Path) -> None:
        self._files = tuple(f"{place}/" if place.is_dir() else f"{place}" for place in places)
        self._found: dict[CodeType, set[int]] = {}
        self.where = ""

    def at(self, number: int, work: Callable[[], object]) -> bool:
        """Do work that is interrupted before the n-th bytecode that it comes to.

        Parameters
        ----------
        number : int
            From 1 on. A test tries one after another until the work comes to its end.
        work : callable
            Without arguments.

        Returns
        -------
        bool
            Whether the work raised KeyboardInterrupt. If code swallows it, as finalizers do, this is False.
        """
        count = 0
        self.where = ""

        def look(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            code = frame.f_code
            if not code.co_filename.startswith(self._files):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            if event == "opcode" and frame.f_lasti not in self._uninterrupted(code):
                count += 1
                if count == number:
                    self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {frame.f_lasti}"
                    raise KeyboardInterrupt
            return look

        before = sys.gettrace()
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
