"""Checks the words of docstrings, comments, names and documents.

    python tools/words.py [--verbose]

A public module, class, function, method or property is in house form if its docstring begins with a statement: not with
a word of CLAUSES, which makes it a relative clause whose subject is elsewhere. An override may leave its docstring to
what it overrides. A public field of a dataclass or struct has a comment on its line or above it. Words of BANNED stand
in no comment, docstring, name or document; CONTRIBUTING.md says what to write in their place.

Prints the share in house form by folder. Exits with 1, and names the places, where a share is below MIN_SHARE, a field
has no comment, or a banned word is found.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("bench", "builder", "passes", "plugins", "runtime", "src")
MIN_SHARE = 0.98  # of the public things of each folder
CLAUSES = ("What", "Of", "Whether", "How", "As", "Which", "Who", "Whose", "The same", "Where", "When", "Those", "That")
# Banned words as a regular expression, and what to write instead.
BANNED = {
    r"behind": "after",
    r"beside(?!s)": "with, next to",
    r"besides": "in addition (to)",
    r"anew": "again",
    r"likewise": "(say it)",
    r"whoever": "(name who)",
    r"twins?": "sibling",
    r"(?:took|taken|takes?) up": "committed, matched, continued",
    r"(?:is|are) said to": "declares",
    r"cannot be had": "is not available",
    r"guess(?:es|ed|ing)?": "draft token, estimate",
    r"roofs?": "roofline",
    r"foresee[ns]?": "predict, plan without data",
}
# Words that stay: part of a path, word, reason.
ALLOWED = (
    ("tools/words.py", ".*", "names them"),
    ("CHANGELOG.md", ".*", "says what was"),
    ("benchmarks/results/", ".*", "was written by earlier benchmarks"),
    ("causal_conv", "behind", "an operand's name in engine files"),
    ("recurrence", "behind", "an operand's name in engine files"),
    ("gemm_cuda.py", "behind", "zeros_behind is a part of kernels' names in engine files"),
    ("csrc/cuda/gemm", "behind", "the field zeros_behind"),
)
PROSE = (".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".pyi", ".toml", ".yaml", ".yml")
_CLAUSE = re.compile(rf"(?:{'|'.join(CLAUSES)})\b")
# `_` and digits end a word, so that names are looked at, too.
_BANNED = re.compile(rf"(?<![a-z])(?:{'|'.join(f'({word})' for word in BANNED)})(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Public:
    """A public module, class, function, method or property."""

    where: str  # path and line
    name: str  # dotted, from its module
    docstring: str | None

    @property
    def fault(self) -> str:
        """The reason why it is not in house form; empty: it is."""
        if not self.docstring:
            return "has no docstring"
        if found := _CLAUSE.match(self.docstring):
            return f"begins with {found[0]!r}: say what it is or does"
        return ""

    @property
    def method(self) -> str:
        """Name of a method in its class; empty: it is none."""
        return self.name.rpartition(".")[2] if "." in self.name else ""


def public_things(path: str, tree: ast.Module) -> Iterator[Public]:
    """Yields the public things of a module; nothing inside a private class or a function is public."""
    yield Public(f"{path}:1", Path(path).stem, ast.get_docstring(tree))
    rest: list[tuple[ast.stmt, str]] = [(node, "") for node in tree.body]
    for node, prefix in rest:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        decorators = [ast.unparse(one) for one in node.decorator_list]
        if any(one.endswith(("overload", ".setter")) for one in decorators):
            continue
        yield Public(f"{path}:{node.lineno}", f"{prefix}{node.name}", ast.get_docstring(node))
        if isinstance(node, ast.ClassDef):
            rest += [(inner, f"{prefix}{node.name}.") for inner in node.body]


def bare_fields(path: str, tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yields the public fields of dataclasses and structs that have no comment."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        kinds = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
        if not any("dataclass" in kind or kind.endswith(("Struct", "NamedTuple")) for kind in kinds):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                own = lines[field.lineno - 2 : field.end_lineno]
                if not field.target.id.startswith("_") and not any("#" in line for line in own):
                    yield f"{path}:{field.lineno}: {node.name}.{field.target.id} has no comment"


def words(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines that hold prose or names. Strings of Python are left out, since they hold data of all kinds."""
    if not path.endswith((".py", ".pyi")):
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and '"""' in token.string
        if token.type in (tokenize.COMMENT, tokenize.NAME) or is_docstring:
            yield from enumerate(token.string.splitlines(), token.start[0])


def banned_words(path: str, text: str) -> Iterator[str]:
    """Yields the banned words of a file with what to write instead."""
    if not _BANNED.search(text):  # most files: to tokenize takes long
        return
    allowed = [word for part, word, _ in ALLOWED if part in path]
    for number, line in words(path, text):
        for found in _BANNED.finditer(line):
            if not any(re.fullmatch(word, found[0], re.IGNORECASE) for word in allowed):
                instead = list(BANNED.values())[found.lastindex - 1] if found.lastindex else ""
                yield f"{path}:{number}: {found[0]!r}: write {instead}"


def folder_of(path: str) -> str:
    """The first two folders of a path."""
    return "/".join(Path(path).parent.parts[:2])


def shares(things: Iterable[Public]) -> Iterator[tuple[str, float, list[Public]]]:
    """Yields each folder, its share of public things in house form, and those that are not."""
    by_folder = defaultdict[str, list[Public]](list)
    for one in things:
        by_folder[folder_of(one.where)].append(one)
    documented = {one.method for found in by_folder.values() for one in found if one.method and one.docstring}
    for folder, found in sorted(by_folder.items()):
        wrong = [one for one in found if one.fault and (one.docstring or one.method not in documented)]
        yield folder, 1 - len(wrong) / len(found), wrong


def main() -> int:
    """Runs the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="name each place, whatever the share")
    arguments = parser.parse_args()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split() if path.endswith(PROSE) and not (ROOT / path).is_symlink()]
    things, wrong_places = list[Public](), list[str]()
    for path in paths:
        text = (ROOT / path).read_text()
        wrong_places += banned_words(path, text)
        if path.endswith(".py") and path.partition("/")[0] in PRODUCT:
            tree = ast.parse(text)
            things += public_things(path, tree)
            wrong_places += bare_fields(path, tree, text.splitlines())
    is_wrong = bool(wrong_places)
    for folder, share, wrong in shares(things):
        is_short = share < MIN_SHARE
        is_wrong |= is_short
        print(f"{folder:24} {share:6.1%} of the public things in house form")
        if is_short or arguments.verbose:
            print(*(f"  {one.where}: {one.name} {one.fault}" for one in wrong), sep="\n")
    print(*wrong_places, sep="\n")
    print(f"{len(wrong_places)} banned words, or fields without a comment")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
