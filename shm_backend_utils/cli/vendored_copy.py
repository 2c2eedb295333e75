"""The copy of the model half in a model's folder: what belongs to it, and what is wrong with it.

The stub of Triton's Python backend puts two folders at the end of ``sys.path``: that of the version, and the model's
own. So a copy in the model's own folder serves every version, and is found only where the server's Python has no such
package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from .. import __version__
from ..repository.source_files import NoSourceError, read_source
from .wording import first_of

__all__ = [
    "DISTRIBUTION",
    "MANIFEST",
    "PACKAGE",
    "UNFINISHED",
    "Flaw",
    "FlawKind",
    "Manifest",
    "digest_of",
    "files_below",
    "flaws",
]

PACKAGE: Final = __name__.partition(".")[0]
DISTRIBUTION: Final = "triton-shm-backend-utils"
MANIFEST: Final = "vendored.json"
UNFINISHED: Final = f".{PACKAGE}-"
"""What the names of folders begin with in which a copy is made, before it gets its place."""

_COMPILED: Final = "__pycache__"

FlawKind = Literal["absent", "added", "foreign", "incomplete", "modified", "other-version", "unfinished"]


class Flaw(NamedTuple):
    """One thing that is wrong with a copy.

    Attributes
    ----------
    kind : str
        ``absent``: there is none. ``added``: it has files that it was not made with. ``foreign``: something of this
        name is there that ``vendor`` did not make. ``incomplete``: files are missing. ``modified``: files have other
        contents. ``other-version``: it is of another version. ``unfinished``: a copy that was broken off has left its
        folder.
    text : str
        What was found and what was expected, in one line.
    """

    kind: FlawKind
    text: str


@dataclass(frozen=True)
class Manifest:
    """What a copy holds, as was written down when it was made.

    Attributes
    ----------
    version : str
        Of this package.
    digests : dict of str to str
        SHA-256 of each file but the manifest itself, by its path in the copy.
    """

    version: str
    digests: dict[str, str]

    @classmethod
    def read(cls, copy: Path) -> Manifest | None:
        """Return that of a copy; None where there is none, or it is not one of ours."""
        try:
            said: Any = json.loads(read_source(copy / MANIFEST))
        except (FileNotFoundError, NoSourceError, NotADirectoryError, RecursionError, ValueError):
            return None
        match said:
            case {"distribution": str(name), "version": str(version), "files": dict(digests)} if name == DISTRIBUTION:
                return cls(version, {str(path): str(digest) for path, digest in digests.items()})
        return None

    def write(self, copy: Path) -> None:
        """Write it into a copy."""
        said = {"distribution": DISTRIBUTION, "version": self.version, "files": self.digests}
        (copy / MANIFEST).write_text(json.dumps(said, indent=1) + "\n")


def flaws(model: Path) -> list[Flaw]:
    """Return what is wrong with the copy in a model's folder: nothing, if it is whole and of this version.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    return [*_flaws_of_copy(model / PACKAGE), *_left_behind(model)]


def files_below(copy: Path) -> Iterator[str]:
    """Yield the paths of all files and links in a copy, but what Python has compiled there and the manifest.

    Raises
    ------
    OSError
        A folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for folder, inner, names in os.walk(copy, onerror=refuse):
        inner[:] = sorted(set(inner) - {_COMPILED})
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = (Path(folder) / name).relative_to(copy).as_posix()
            if path != MANIFEST:
                yield path


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file; nothing, which is no file's, if it is something else.

    As a pipe is, or what is too large; or a link, as what it leads to may change without a trace in the copy.
    """
    try:
        return hashlib.sha256(read_source(file)).hexdigest() if file.is_file() and not file.is_symlink() else ""
    except NoSourceError:
        return ""


def _flaws_of_copy(copy: Path) -> Iterator[Flaw]:
    if not os.path.lexists(copy):
        yield Flaw("absent", f"there is no {copy}")
        return
    manifest = None if copy.is_symlink() else Manifest.read(copy)
    if manifest is None:
        yield Flaw("foreign", f"{copy} has no {MANIFEST} of {DISTRIBUTION}, so it was not made by vendor")
        return
    present = {path: digest_of(copy / path) for path in files_below(copy)}
    missing = sorted(manifest.digests.keys() - present.keys())
    added = sorted(present.keys() - manifest.digests.keys())
    changed = sorted(
        path for path in manifest.digests.keys() & present.keys() if present[path] != manifest.digests[path]
    )
    if missing:
        yield Flaw("incomplete", f"{copy} lacks {first_of(missing)}")
    if changed:
        yield Flaw("modified", f"{copy} has other contents than it was made with in {first_of(changed)}")
    if added:
        yield Flaw("added", f"{copy} has what it was not made with: {first_of(added)}")
    if manifest.version != __version__:
        yield Flaw("other-version", f"{copy} is of version {manifest.version}, and this is {__version__}")


def _left_behind(model: Path) -> Iterator[Flaw]:
    for left in sorted(model.glob(f"{UNFINISHED}*")):
        yield Flaw("unfinished", f"{left} is of a copy that was broken off")
