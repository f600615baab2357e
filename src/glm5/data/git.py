"""Reading a local git repository through the ``git`` command: files of a revision, commits and their diffs.

Nothing is checked out and nothing is written; a bare repository works too. Blobs that are not UTF-8 text, symbolic
links and submodules are left out.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import DataError

_COMMIT_FORMAT = "%H%x00%P%x00%B%x00%x01"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit that is no merge."""

    sha: str
    parent: str
    """Empty for the first commit."""
    message: str

    @property
    def references(self) -> tuple[int, ...]:
        """Numbers of the issues and pull requests that the message names as ``#12``, in their order."""
        return tuple(dict.fromkeys(int(number) for number in re.findall(r"#(\d+)\b", self.message)))


class GitRepository:
    """A repository at one revision."""

    def __init__(self, path: Path, revision: str) -> None:
        """Raises DataError when ``path`` is no repository or has no such revision."""
        self.path = path
        if not path.is_dir():
            raise DataError(f"git:{path}: no such folder; give the path of a git repository")
        self.revision = self._run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}",
                                  failure=f"no git repository with revision {revision!r}").decode().strip()
        """Full hash of the commit."""
        self.name = path.resolve().name.removesuffix(".git")

    @classmethod
    def from_spec(cls, spec: str) -> GitRepository:
        """The repository of a source ``git:PATH`` or ``git:PATH@REVISION``."""
        path, separator, revision = spec.removeprefix("git:").rpartition("@")
        return cls(Path(path), revision) if separator else cls(Path(revision), "HEAD")

    def files(self, revision: str = "") -> Iterator[tuple[str, str]]:
        """(path, text) of every text file at ``revision`` (the repository's own by default), in order of the paths."""
        entries = self._run("ls-tree", "-r", "-z", "--full-tree", revision or self.revision).split(b"\0")
        blobs = []
        for entry in filter(None, entries):
            description, path = entry.split(b"\t", 1)
            mode, kind, blob = description.split(b" ")
            if kind == b"blob" and mode.startswith(b"100"):
                blobs.append((path.decode("utf-8", "replace"), blob))
        yield from self._texts(sorted(blobs))

    def commits(self, count: int) -> list[Commit]:
        """The newest ``count`` commits without merges, oldest first."""
        output = self._run("log", "--no-merges", f"--max-count={count}", f"--format={_COMMIT_FORMAT}", self.revision)
        records = [record.strip("\n").split("\0") for record in output.decode("utf-8", "replace").split("\x01")]
        return [Commit(sha, parents.split(" ")[0], message.strip())
                for sha, parents, message, _ in reversed([record for record in records if len(record) == 4])]

    def changed_paths(self, commit: Commit) -> list[str]:
        """Paths that a commit adds, changes or removes, in order."""
        output = self._run("diff-tree", "--root", "--no-commit-id", "--name-only", "-r", "-z", commit.sha)
        return sorted(path.decode("utf-8", "replace") for path in output.split(b"\0") if path)

    def diff(self, commit: Commit) -> str:
        """The unified diff of a commit, without the contents of binary files."""
        output = self._run("diff-tree", "--root", "--no-commit-id", "--patch", "--no-color", "--no-ext-diff",
                           "--no-textconv", "-M", commit.sha)
        return output.decode("utf-8", "replace")

    def _texts(self, blobs: list[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
        """Contents of ``blobs``, one process for all of them."""
        if not blobs:
            return
        command = ["git", "-C", str(self.path), "cat-file", "--batch"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            for path, blob in blobs:
                process.stdin.write(blob + b"\n")
                process.stdin.flush()
                size = int(process.stdout.readline().split(b" ")[2])
                data = process.stdout.read(size)
                process.stdout.read(1)
                try:
                    text = data.decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if "\0" not in text:
                    yield path, text

    def _run(self, *arguments: str, failure: str = "") -> bytes:
        try:
            result = subprocess.run(["git", "-C", str(self.path), *arguments], capture_output=True, check=False)
        except FileNotFoundError:
            raise DataError(f"git:{self.path}: the git command is not installed; install git") from None
        if result.returncode:
            reason = failure or (result.stderr.decode("utf-8", "replace").strip().splitlines() or ["unknown"])[0]
            raise DataError(f"git:{self.path}: {reason}; give the path of a git repository")
        return result.stdout
