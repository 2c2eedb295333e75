"""Whether the commands of a page are there, and know the options that they are given."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from importlib.util import find_spec
from typing import Final

from .documents import ROOT

# Programs of others. Their options are theirs; they need not be on this machine.
OF_OTHERS: Final = frozenset(
    [
        *("apt-get", "cat", "cd", "cp", "curl", "docker", "echo", "export", "git"),
        *("head", "helm", "kubectl", "kubeconform", "kustomize", "ls", "mkdir", "mv", "od"),
        *("perf_analyzer", "promtool", "pytest", "rm", "split", "sysctl", "tar", ".", "[", "set", "source", "true"),
    ]
)
OF_THIS_PACKAGE: Final = "shm-backend-utils"
PYTHONS: Final = ("python", "python3", ".venv/bin/python")
FOLLOWS: Final = frozenset({"&&", "||", ";", "|", "(", ")", "&", "do", "then"})
EXTRAS: Final = re.compile(r"(?:\.|shm[-_]backend[-_]utils[^\[\s]*)\[([\w,-]+)\]")
WITHOUT_HELP: Final = ("setup", "test")  # the first has no options to speak of; the second hands its own to pytest
AMOUNTS: Final = "tests/conftest.py"  # has the options that scripts/test adds to pytest's


def complaints(code: str) -> list[str]:
    """Return what is wrong with a block of shell commands; nothing is run but ``--help``."""
    done = subprocess.run(["sh", "-n"], input=code, capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stderr.strip()]
    return [complaint for command in _commands(code) for complaint in _about(command)]


def _commands(code: str) -> Iterator[list[str]]:
    """Yield each simple command, its words, without assignments before it and redirections behind it."""
    for line in code.replace("\\\n", " ").splitlines():
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            yield from _commands(inner)
        lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "VALUE", line), posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in FOLLOWS:
                if words:
                    yield words
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)


def _about(command: list[str]) -> Iterator[str]:
    name, *arguments = command
    if name in PYTHONS or name.endswith("bin/python"):
        yield from _about_python(arguments)
    elif name.startswith("scripts/"):
        yield from _about_ours(name.removeprefix("scripts/"), f"scripts/{name.removeprefix('scripts/')}", arguments)
    elif name == OF_THIS_PACKAGE:
        yield from _about_options((sys.executable, "-m", "shm_backend_utils", *arguments[:1]), name, arguments[1:])
    elif name in ("pip", "pip3") or name.endswith("/pip"):
        yield from _about_pip(arguments)
    elif name.rpartition("/")[2] not in OF_OTHERS and name.startswith((".venv", "tests/", "examples/")):
        if not name.startswith(".venv") and not (ROOT / name).exists():
            yield f"{name} is not there"
    elif name.rpartition("/")[2] not in OF_OTHERS and shutil.which(name) is None:
        yield f"{name} is no command of this project, and not listed in tests/docs/commands.py"


def _about_ours(script: str, name: str, arguments: list[str]) -> Iterator[str]:
    path = ROOT / "scripts" / script
    if not path.is_file():
        yield f"{name} is not there"
    elif script == "test":
        known = (ROOT / AMOUNTS).read_text() + (ROOT / "scripts/tools/test.py").read_text()
        ours = {option.partition("=")[0] for option in arguments if option.startswith("--")} - {"--timeout"}
        yield from (f"{name} has no option {option}" for option in sorted(ours) if option not in known)
        yield from (f"{word} is not there" for word in arguments if "/" in word and not (ROOT / word).exists())
    elif script not in WITHOUT_HELP:
        started = re.search(r'/tools/(start|command)" (\w+)|-m (scripts\.tools\.\w+)', path.read_text())
        assert started is not None, f"{name} starts nothing that is known here"
        module = ("shm_backend_utils", started[2]) if started[1] == "command" else (f"scripts.tools.{script}",)
        yield from _about_options((sys.executable, "-m", *module), name, [a for a in arguments if a != "--python"])


def _about_python(arguments: list[str]) -> Iterator[str]:
    if not arguments or arguments[0] in ("-c", "-X"):
        return
    if arguments[0] != "-m":
        if arguments[0].startswith("examples/") and not (ROOT / arguments[0]).is_file():
            yield f"{arguments[0]} is not there"
    elif arguments[1] == "pip":
        yield from _about_pip(arguments[2:])
    elif arguments[1] not in ("venv", "build") and find_spec(arguments[1]) is None:
        yield f"there is no module {arguments[1]}"


def _about_pip(arguments: list[str]) -> Iterator[str]:
    extras = metadata("triton-shm-backend-utils").get_all("Provides-Extra") or []
    wanted = {extra for word in arguments for found in EXTRAS.findall(word) for extra in found.split(",")}
    yield from (f"there is no extra {extra}" for extra in sorted(wanted - {*extras}))


def _about_options(program: tuple[str, ...], name: str, arguments: list[str]) -> Iterator[str]:
    options = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
    known = _help(program)
    if known is None:
        yield f"{name}: {' '.join(program[3:])} is no command"
    else:
        listed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", known))
        yield from (f"{name} has no option {option}" for option in sorted(options - listed))


@functools.cache
def _help(program: tuple[str, ...]) -> str | None:
    done = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
