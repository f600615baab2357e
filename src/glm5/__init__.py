"""glm5: the complete GLM-5 system. Public names are loaded on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Tokenizer": "glm5.tokenizer.bpe",
    "load_tokenizer": "glm5.tokenizer.bpe",
    "ModelConfig": "glm5.model.config",
    "load_model": "glm5.model.checkpoint",
    "save_model": "glm5.model.checkpoint",
    "Engine": "glm5.engine.engine",
    "SamplingParams": "glm5.records",
    "Episode": "glm5.records",
    "Trajectory": "glm5.records",
    "Taskset": "glm5.env.service",
    "Task": "glm5.env.service",
    "load_config": "glm5.config",
    "Glm5Error": "glm5.errors",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'glm5' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
