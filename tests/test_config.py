"""Every mistake in a configuration gives one line that names the file and the key."""

from dataclasses import dataclass, field

import pytest

from glm5.config import load_config
from glm5.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    lr: float = 1e-3
    kind: str = "muon"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    name: str
    steps: int = 10
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: expected at least 1; raise steps")


def write(path, text):
    path.write_text(text)
    return path


def test_nested_values_and_overrides(tmp_path):
    path = write(tmp_path / "a.toml", 'name = "x"\n[optimizer]\nlr = 0.5\n')
    loaded = load_config(Stage, path, ["steps=3", "optimizer.kind=adamw"])
    assert loaded == Stage(name="x", steps=3, optimizer=Optimizer(lr=0.5, kind="adamw"))


def test_extends_merges_tables(tmp_path):
    write(tmp_path / "base.toml", 'name = "base"\nsteps = 7\n[optimizer]\nlr = 0.5\nkind = "adamw"\n')
    path = write(tmp_path / "a.toml", 'extends = "base.toml"\nname = "x"\n[optimizer]\nlr = 0.1\n')
    assert load_config(Stage, path) == Stage(name="x", steps=7, optimizer=Optimizer(lr=0.1, kind="adamw"))


@pytest.mark.parametrize(("text", "words"), [
    ('name = "x"\nstep = 3\n', ["a.toml", "step", "did you mean 'steps'"]),
    ('name = "x"\n[optimizer]\nlrr = 3\n', ["a.toml", "optimizer.lrr", "did you mean 'lr'"]),
    ("steps = 3\n", ["a.toml", "name", "missing"]),
    ('name = "x"\nsteps = "many"\n', ["a.toml", "steps", "'many'"]),
    ('name = "x"\nsteps = 0\n', ["a.toml", "steps=0", "at least 1"]),
    ("name = ", ["a.toml", "not valid TOML"]),
    ('extends = "gone.toml"\n', ["gone.toml", "cannot be read"]),
])
def test_a_mistake_is_one_line_that_names_file_and_key(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(Stage, write(tmp_path / "a.toml", text))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_base_may_not_extend_another(tmp_path):
    write(tmp_path / "c.toml", "")
    write(tmp_path / "b.toml", 'extends = "c.toml"\n')
    with pytest.raises(ConfigError, match=r"b\.toml: extends"):
        load_config(Stage, write(tmp_path / "a.toml", 'extends = "b.toml"\n'))


def test_an_override_without_a_value_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="key=value"):
        load_config(Stage, write(tmp_path / "a.toml", 'name = "x"\n'), ["steps"])
