"""Adds files from outside docs/ to the site, and points links of all pages at the site's own pages.

MkDocs loads this file as a hook (mkdocs.yml). The same Markdown is read as plain files in the repository, so its links
are relative to the file. A link to a file that is no page of the site, such as a source file, becomes plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ADDED = ("CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md", "benchmarks/README.md", "benchmarks/results/*")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files under their paths in the repository."""
    from mkdocs.structure.files import File

    for pattern in ADDED:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in (".md", ".svg"):
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites relative links of a page."""
    uri = page.file.src_uri
    source = uri if page.file.generated_by else f"docs/{uri}"

    def rewritten(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = path.removeprefix("docs/")
        if files.get_file_from_path(there) is None:
            assert (ROOT / path).exists(), f"{source} links to {target}, which does not exist"
            return text
        return f"{mark}[{text}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor or ''})"

    return LINK.sub(rewritten, markdown)
