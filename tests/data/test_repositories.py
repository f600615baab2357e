"""Git repositories as sources, and repository-level sequences in the order in which they help."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from glm5.data.config import CorpusConfig, RepositoryConfig
from glm5.data.git import GitRepository
from glm5.data.repositories import dependency_order, imports, read_issues, repository_documents
from glm5.data.sources import corpus_fingerprint, read_documents
from glm5.errors import ConfigError, DataError


def words(text: str) -> int:
    return len(text.split())


def test_a_repository_gives_the_text_files_of_a_revision(repository: Path) -> None:
    documents = {item.path: item.text for item in read_documents([f"git:{repository}"])}
    assert sorted(documents) == [
        "project/README.md", "project/src/app/area.py", "project/src/app/main.py", "project/src/app/unit.py"
    ]
    assert "x * x" in documents["project/src/app/area.py"]
    first = {item.path: item.text for item in read_documents([f"git:{repository}@HEAD~2"])}
    assert first["project/README.md"] == "A project.\n"
    assert corpus_fingerprint([f"git:{repository}"]) != corpus_fingerprint([f"git:{repository}@HEAD~2"])


def test_a_bare_clone_gives_the_same_files(repository: Path, tmp_path: Path) -> None:
    bare = tmp_path / "project.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(repository), str(bare)], check=True, capture_output=True)
    assert list(read_documents([f"git:{bare}"])) == list(read_documents([f"git:{repository}"]))


def test_commits_come_oldest_first_without_merges_and_know_what_they_name(repository: Path) -> None:
    source = GitRepository.from_spec(f"git:{repository}")
    commits = source.commits(10)
    assert {commit.message.splitlines()[0] for commit in commits} == {
        "First version", "Square multiplies (fixes #7, see #99)", "Say what it is"
    }
    assert commits[0].message == "First version" and commits[0].parent == ""
    fix = next(commit for commit in commits if commit.references)
    assert fix.references == (7, 99)
    assert source.changed_paths(fix) == ["src/app/area.py"]
    assert "-    return x + x\n+    return x * x\n" in source.diff(fix)
    assert source.changed_paths(commits[0])[0] == "README.md"
    assert len(source.commits(1)) == 1


def test_what_is_no_repository_is_named(repository: Path, tmp_path: Path) -> None:
    for spec, match in ((f"git:{tmp_path / 'none'}", "no such folder"), (f"git:{tmp_path}", "no git repository"),
                        (f"git:{repository}@nowhere", "revision 'nowhere'")):
        with pytest.raises(DataError, match=match) as caught:
            list(read_documents([spec]))
        assert "\n" not in str(caught.value)


def test_files_come_after_those_that_they_import() -> None:
    files = {"a/main.py": "from a.deep.part import x\nimport os\n", "a/deep/part.py": "import base\n", "base.py": "",
             "z.c": '#include "lib/z.h"\n#include <stdio.h>\n', "lib/z.h": "", 
             "one.py": "import two", "two.py": "import one"}
    order = dependency_order(files)
    assert sorted(order) == sorted(files)
    assert order == ["base.py", "a/deep/part.py", "a/main.py", "lib/z.h", "two.py", "one.py", "z.c"]
    assert imports(files, ["a/main.py", "z.c"]) == {"a/main.py": ["a/deep/part.py"], "z.c": ["lib/z.h"]}


def test_an_ambiguous_import_means_the_nearest_file() -> None:
    files = {"x/unit.py": "", "y/unit.py": "", "y/main.py": "import unit\n"}
    assert imports(files, ["y/main.py"]) == {"y/main.py": ["y/unit.py"]}


def test_sequences_hold_issue_files_before_the_change_and_the_diff_last(repository: Path, tmp_path: Path) -> None:
    issues = tmp_path / "issues.jsonl"
    issues.write_text(json.dumps({"number": 7, "title": "Square is wrong", "body": "square(3) gives 6"}) + "\n")
    config = RepositoryConfig(enabled=True, commits=10, issues=str(issues))
    documents = list(repository_documents(GitRepository.from_spec(f"git:{repository}"), config, 500, words))
    tree, *changes = documents
    assert tree.path == "project#0"
    headers = [line for line in tree.text.splitlines() if line.startswith("### ")]
    assert headers == ["### File: README.md", "### File: src/app/unit.py", "### File: src/app/area.py",
                       "### File: src/app/main.py"]
    fix = next(document.text for document in changes if "Square multiplies" in document.text)
    parts = [fix.index(part) for part in (
        "### Issue #7\nSquare is wrong\n\nsquare(3) gives 6\n", "### File: src/app/area.py\n", "return x + x\n",
        "### File: src/app/unit.py\n", "### Commit ", "Square multiplies", "+    return x * x")]
    assert parts == sorted(parts)
    assert len({document.path for document in documents}) == len(documents) == 4


@pytest.mark.parametrize("length", [12, 30, 70])
def test_no_sequence_is_longer_than_a_row(repository: Path, length: int) -> None:
    config = RepositoryConfig(enabled=True, commits=10)
    documents = list(repository_documents(GitRepository.from_spec(f"git:{repository}"), config, length, words))
    assert documents and all(words(document.text) <= length for document in documents)


def test_malformed_issues_and_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "issues.jsonl").write_text('{"number": "7", "title": "x"}\n')
    with pytest.raises(DataError, match=r"issues\.jsonl:1: no integer 'number'"):
        read_issues(tmp_path / "issues.jsonl")
    with pytest.raises(ConfigError, match="issues needs commits"):
        RepositoryConfig(issues="x")
    with pytest.raises(ConfigError, match="need sources of the form git:PATH"):
        CorpusConfig(sources=("stdlib",), repository=RepositoryConfig(enabled=True))
