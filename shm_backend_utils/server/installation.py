"""A folder with a tritonserver: where its parts are, of which version it is, and whether it runs here."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from ..errors import MachineError

__all__ = ["PYTHON", "Installation", "find_libpython"]

PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
_STUB: Final = "triton_python_backend_stub"
_BACKEND: Final = ("libtriton_python.so", _STUB, "triton_python_backend_utils.py")
_PATIENCE_S: Final = 60.0
_PRINTED_VERSION: Final = re.compile(r"\| server_version +\| (\d+\.\d+\S*)")
_WITHOUT_LIBRARY: Final = re.compile(r"error while loading shared libraries: (.+)")
_FOR_NEWER_SYSTEM: Final = re.compile(r"\S+: version `\S+' not found.*")
_LINKED_PYTHON: Final = re.compile(rb"libpython(3\.\d+)\.so")
_NUMBERS: Final = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class Installation:
    """An installed server.

    Attributes
    ----------
    folder : pathlib.Path
        Holds ``bin``, ``lib`` and ``backends``, and maybe ``numpy``.
    known_triton : str, optional
        Its version, if known: asking the server takes a second.
    """

    folder: Path
    known_triton: str | None = field(default=None, compare=False)

    @property
    def binary(self) -> Path:
        """The server's executable."""
        return self.folder / "bin" / "tritonserver"

    @property
    def libraries(self) -> Path:
        """The folder of the libraries that came with it."""
        return self.folder / "lib"

    @property
    def backends(self) -> Path:
        """The folder for ``--backend-directory``."""
        return self.folder / "backends"

    @property
    def numpy(self) -> Path:
        """The folder for the NumPy that the stub was built for."""
        return self.folder / "numpy"

    @property
    def is_complete(self) -> bool:
        """Whether everything is there. An installation appears whole or not at all."""
        return self.binary.is_file()

    @cached_property
    def triton(self) -> str:
        """The server's version, such as ``"2.51.0"``; the server is asked unless it is known.

        Raises
        ------
        MachineError
            It is not a server, or does not run here; the text says why.
        """
        if self.known_triton is not None:
            return self.known_triton
        if not self.is_complete:
            raise MachineError(f"{self.folder} is not a server's folder: it has no bin/tritonserver")
        # Without a folder of models it prints its options, and exits. GPUs are hidden, as they take time to initialize.
        printed = self._printed_by(self.binary, {"CUDA_VISIBLE_DEVICES": ""})
        version = _PRINTED_VERSION.search(printed)
        if version is None:
            last_words = printed.strip().splitlines()[-1:] or ["nothing"]
            raise MachineError(f"{self.binary} is not a tritonserver: asked for its version, it says {last_words[0]!r}")
        return version[1]

    def is_at_least(self, triton: str) -> bool:
        """Return whether the server is of a version of Triton, such as ``"2.46"``, or of a later one."""
        return _numbers(self.triton) >= _numbers(triton)

    def check(self) -> None:
        """Check that the server runs here, and that models run in this Python.

        Raises
        ------
        MachineError
            One of them does not; the text names the missing part.
        """
        version, backend = self.triton, self.backends / "python"
        if missing := [name for name in _BACKEND if not (backend / name).is_file()]:
            raise MachineError(
                f"{self.folder} is Triton {version} without Python backend: no backends/python/{missing[0]}"
            )
        stub = backend / _STUB
        linked = _LINKED_PYTHON.search(stub.read_bytes())
        if linked is not None and linked[1].decode() != PYTHON:
            raise MachineError(
                f"{stub} runs Python {linked[1].decode()}, and this is Python {PYTHON}: use that one, or put a stub "
                "for this one there"
            )
        self._printed_by(stub, {})

    def _printed_by(self, program: Path, variables: dict[str, str]) -> str:
        """Run one of the server's programs without arguments until it ends, and return its output."""
        try:
            ended = subprocess.run(
                [program], env=self.environment() | variables, capture_output=True, timeout=_PATIENCE_S, check=False
            )
        except PermissionError:
            raise MachineError(f"{program} may not be executed: chmod +x it, on a file system without noexec") from None
        except OSError as error:
            raise MachineError(
                f"{program} cannot be executed here ({error.strerror}): is it built for {platform.machine()}?"
            ) from None
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"{program} did not end within {_PATIENCE_S:g} s; a server without models ends at once"
            ) from None
        printed = (ended.stdout + ended.stderr).decode(errors="replace")
        if (missing := _WITHOUT_LIBRARY.search(printed)) is not None:
            raise MachineError(f"{program} cannot be loaded: {missing[1]}; install it, or put it into {self.libraries}")
        if (newer := _FOR_NEWER_SYSTEM.search(printed)) is not None:
            raise MachineError(f"{program} was built on a newer system than this: {newer[0]}")
        return printed

    def environment(self, python_environment: Path | None = None) -> dict[str, str]:
        """Return the environment to start the server in.

        The stub runs an isolated interpreter, which ignores ``PYTHONPATH`` and finds its packages through ``PATH``; it
        needs the shared library of this interpreter. Libraries in ``LD_LIBRARY_PATH`` here, such as CUDA's, are found
        there, too.

        Parameters
        ----------
        python_environment : pathlib.Path, optional
            A virtual environment of this interpreter, for the stub's packages; those of this process if not given.
        """
        environment = dict(os.environ)
        programs = [str(Path(prefix) / "bin") for prefix in (python_environment, sys.prefix) if prefix is not None]
        environment["PATH"] = os.pathsep.join([*programs, environment.get("PATH", os.defpath)])
        libraries = [str(self.libraries), str(find_libpython().parent), environment.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return environment


def find_libpython() -> Path:
    """Return the interpreter's shared library, which the stub loads."""
    name = f"libpython{PYTHON}.so.1.0"
    ours, built, multiarch = sysconfig.get_config_vars("LIBDIR", "LIBPL", "MULTIARCH")
    for folder in (ours, f"{sys.base_prefix}/lib", built, f"/usr/lib/{multiarch or ''}"):
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    raise MachineError(
        f"this Python has no shared library {name}, which Triton's Python backend loads; install it (Debian, Ubuntu: "
        f"apt-get install libpython{PYTHON}) or use a Python that was built with --enable-shared"
    )


def _numbers(version: str) -> tuple[int, ...]:
    found = _NUMBERS.match(version)
    return tuple(map(int, found[0].split("."))) if found else ()
