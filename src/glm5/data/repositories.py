"""Repository-level sequences: what belongs together in a project, side by side in one document of at most one row.

Two kinds, as in GLM-5's software-engineering data (files, diffs, issues and pull requests concatenated):

- files: all files of a revision, those that others import first, in as many sequences as they need;
- change: the issue or pull request that a commit names, the files that it touches as they were before, then files of
  the repository that those import, while there is room; last the commit's message and diff, which can be predicted
  from what stands before.

Sections are headed by a line that names them. A change whose diff does not fit gives an empty text; of a file that is
longer than a sequence only the beginning is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from glm5.data.config import RepositoryConfig
from glm5.data.git import Commit, GitRepository
from glm5.data.sources import Document, read_jsonl
from glm5.errors import DataError

CountTokens = Callable[[str], int]
_IMPORTS = re.compile(
    r"^\s*(?:from\s+([.\w]+)\s+import|import\s+([.\w]+)|#include\s+[\"<]([^\">]+)[\">])", re.MULTILINE
)
_MOST_CHARS = 16
"""Characters per token from which a text is cut without counting; few tokens are so long, and counting costs."""
_SMALLEST_CUT = 64
"""Tokens below which the beginning of a file is not worth a section."""


def repository_documents(
    repository: GitRepository, config: RepositoryConfig, length: int, count_tokens: CountTokens
) -> Iterator[Document]:
    """The sequences of ``repository``, each of at most ``length`` tokens by ``count_tokens``; an empty text
    stands for a change that does not fit."""
    files = dict(repository.files())
    yield from _file_sequences(repository.name, files, length, count_tokens)
    if config.commits:
        issues = read_issues(Path(config.issues)) if config.issues else {}
        for commit in repository.commits(config.commits):
            text = _change_sequence(repository, commit, issues, length, count_tokens)
            yield Document(text, f"{repository.name}@{commit.sha[:12]}")


def read_issues(path: Path) -> dict[int, str]:
    """Text of each issue or pull request by number. Raises DataError naming the line of a record without number or
    title."""
    issues = {}
    for line, record in read_jsonl(path):
        number, title = record.get("number"), record.get("title")
        if not isinstance(number, int) or not isinstance(title, str):
            raise DataError(f"{path}:{line}: no integer 'number' and string 'title'; found {sorted(record)[:8]}")
        issues[number] = _section(f"Issue #{number}", f"{title}\n\n{record.get('body') or ''}".strip())
    return issues


def dependency_order(files: dict[str, str]) -> list[str]:
    """Paths with those that others import before them, otherwise by path; a cycle is broken at its first path."""
    targets = imports(files, list(files))
    order: list[str] = []
    state: dict[str, bool] = {}  # False while its imports are being placed, True when placed
    for root in sorted(files):
        stack = [root]
        while stack:
            path = stack[-1]
            if path not in state:
                state[path] = False
                stack += [target for target in reversed(targets[path]) if target not in state]
                continue
            stack.pop()
            if not state[path]:
                state[path] = True
                order.append(path)
    return order


def imports(files: dict[str, str], paths: Sequence[str]) -> dict[str, list[str]]:
    """Paths of ``files`` that each of ``paths`` names in a Python import or a C include, in order of the names.

    A name is looked up by its longest suffix; where several files end alike, the one nearest to the importing file in
    the tree is meant, then the first by path.
    """
    by_suffix: dict[str, list[str]] = {}
    for path in sorted(files):
        parts = _name_parts(path)
        for start in range(len(parts)):
            by_suffix.setdefault("/".join(parts[start:]), []).append(path)
    found: dict[str, list[str]] = {}
    for path in paths:
        names = sorted({next(filter(None, match)) for match in _IMPORTS.findall(files[path])})
        matches = (_nearest(by_suffix.get(_as_path(name), []), path) for name in names)
        found[path] = [target for target in dict.fromkeys(matches) if target and target != path]
    return found


def _file_sequences(name: str, files: dict[str, str], length: int, count_tokens: CountTokens) -> Iterator[Document]:
    sections: list[str] = []
    used = number = 0
    for path in dependency_order(files):
        section = _shorten(_section(f"File: {path}", files[path]), length, count_tokens)
        size = count_tokens(section)
        if sections and used + size > length:
            yield Document("".join(sections), f"{name}#{number}")
            sections, used, number = [], 0, number + 1
        sections.append(section)
        used += size
    if sections:
        yield Document("".join(sections), f"{name}#{number}")


def _change_sequence(
    repository: GitRepository, commit: Commit, issues: dict[int, str], length: int, count_tokens: CountTokens
) -> str:
    """Issue, files before, message and diff of one commit; empty when the diff alone is too long."""
    change = _section(f"Commit {commit.sha[:12]}", f"{commit.message}\n\n{repository.diff(commit)}")
    room = length - count_tokens(change)
    if room < 0:
        return ""
    sections = []
    for number in commit.references:
        if number in issues and count_tokens(issues[number]) <= room:
            sections.append(issues[number])
            room -= count_tokens(issues[number])
    before = dict(repository.files(commit.parent)) if commit.parent else {}
    touched = [path for path in repository.changed_paths(commit) if path in before]
    related = [target for targets in imports(before, touched).values() for target in targets]
    for path in dict.fromkeys([*touched, *related]):
        section = _shorten(_section(f"File: {path}", before[path]), room, count_tokens)
        if section:
            sections.append(section)
            room -= count_tokens(section)
    return "".join([*sections, change])


def _section(title: str, text: str) -> str:
    return f"### {title}\n{text}\n\n" if not text.endswith("\n") else f"### {title}\n{text}\n"


def _shorten(section: str, room: int, count_tokens: CountTokens) -> str:
    """The longest beginning of ``section`` in whole lines that has at most ``room`` tokens; empty when it is too short
    to be of use."""
    is_long = len(section) > room * _MOST_CHARS
    if not is_long and count_tokens(section) <= room:
        return section
    if room < _SMALLEST_CUT:
        return ""
    lines = section[: room * _MOST_CHARS].splitlines(keepends=True)
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens("".join(lines[:middle])) <= room:
            low = middle
        else:
            high = middle - 1
    return "".join(lines[:low])


def _name_parts(path: str) -> list[str]:
    """Parts by which a file is imported: a package by its folder, a Python module without ending, a header with it."""
    pure = PurePosixPath(path)
    if pure.name == "__init__.py":
        return list(pure.parent.parts)
    return list(pure.with_suffix("").parts if pure.suffix == ".py" else pure.parts)


def _as_path(name: str) -> str:
    """``a.b`` → ``a/b``; a header name is a path already. The dots that start a relative import do not count."""
    return name if name.endswith((".h", ".hpp", ".hh", ".cuh")) or "/" in name else name.strip(".").replace(".", "/")


def _nearest(candidates: Sequence[str], path: str) -> str | None:
    def shared(candidate: str) -> int:
        pairs = zip(PurePosixPath(candidate).parts, PurePosixPath(path).parts, strict=False)
        return next((number for number, (a, b) in enumerate(pairs) if a != b), 0)

    return max(candidates, key=shared, default=None)
