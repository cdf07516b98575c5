"""Rules for our own Python, checked in its syntax tree: it may not run what it reads, nor start a shell."""

import ast
from collections.abc import Iterator

FORBIDDEN_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {
    "builtins.compile",
    "builtins.eval",
    "builtins.exec",
    "os.popen",
    "os.system",
    "torch.jit.load",
    "torch.load",
    "yaml.full_load",
    "yaml.load",
    "yaml.unsafe_load",
}
FORBIDDEN_KEYWORDS = {"allow_pickle", "shell", "trust_remote_code"}  # unless a plain False
BUILTINS = {"compile", "eval", "exec"}


def violations(source: str) -> Iterator[str]:
    """Yields "line: what" for everything in `source` that is forbidden."""
    tree = ast.parse(source)
    names = _imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node):
                if module.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"{node.lineno}: imports {module}"
        elif isinstance(node, ast.Attribute | ast.Name):
            if (name := _dotted(node, names)) in FORBIDDEN_CALLS:
                yield f"{node.lineno}: uses {name}"
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_KEYWORDS and not _is_false(node.value):
            yield f"{node.value.lineno}: passes {node.arg}"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Imported local names → the dotted names that they stand for."""
    names = {name: f"builtins.{name}" for name in BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"
