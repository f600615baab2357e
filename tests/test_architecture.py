"""The import table of docs/architecture.md, enforced."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "glm5"
BASE = {"errors", "records", "config", "runlog", "process", "wire", "device"}
MAY_IMPORT = {
    "errors": set(),
    "records": set(),
    "config": {"errors"},
    "runlog": {"errors"},
    "process": {"errors", "runlog"},
    "wire": {"errors"},
    "device": {"errors"},
    "tokenizer": BASE,
    "data": BASE | {"tokenizer"},
    "kernels": BASE,
    "model": BASE | {"kernels"},
    "train": BASE | {"tokenizer", "data", "kernels", "model"},
    "engine": BASE | {"tokenizer", "kernels", "model"},
    "serve": BASE | {"tokenizer", "engine"},
    "gateway": BASE | {"tokenizer"},
    "env": BASE | {"tokenizer"},
    "rl": BASE | {"tokenizer", "data", "kernels", "model", "train", "engine", "serve", "gateway", "env"},
    "eval": BASE | {"tokenizer", "data", "kernels", "model", "engine", "serve", "gateway", "env"},
}
TORCH_FREE = {*BASE - {"device"}, "tokenizer", "gateway", "env"}


def imported_modules(path: Path) -> set[str]:
    """Absolute dotted names of everything that ``path`` imports, at any depth of the file."""
    parents = ("glm5", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = parents[: len(parents) - node.level + 1] if node.level else ()
            base = ".".join((*prefix, *(node.module or "").split("."))).strip(".")
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def test_layers_import_only_what_the_table_allows():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] == "torch" and layer in TORCH_FREE:
                wrong.append(f"{path}: {layer} is torch-free")
            is_ours = parts[0] == "glm5" and len(parts) > 1
            is_ours = is_ours and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file())
            if is_ours and layer in MAY_IMPORT and parts[1] not in MAY_IMPORT[layer] | {layer}:
                wrong.append(f"{path}: {layer} may not import {parts[1]}")
    assert not wrong, "\n".join(wrong)


def test_torch_free_layers_leave_torch_unloaded():
    modules = "glm5, glm5.process, glm5.device, glm5.tokenizer, glm5.gateway.app, glm5.env.service, glm5.env.client"
    modules += ", glm5.cli"
    configs = "glm5.model.config, glm5.train.config, glm5.engine.config, glm5.rl.config"
    configs += ", glm5.rl.ledger, glm5.rl.orchestrator, glm5.data.loader, glm5.data.prepare"
    code = f"import {modules}, {configs}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_drawer_modules():
    drawers = {"utils", "util", "common", "helpers", "misc", "core", "manager"}
    assert not [path for path in PACKAGE.rglob("*") if path.stem in drawers]
