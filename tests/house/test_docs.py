"""The README and the documentation: commands and options that they name exist, code compiles, links lead somewhere.

tests/long/test_docs.py runs the commands and the scripts.
"""

import json
import re
import shlex
import tomllib
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import chart
import click
import pytest

from enginewright.builder.model_list import families, wrappers
from enginewright.cli import main
from tests.helpers.documents import PAGES, ROOT, SERVER, blocks, prose

LANGUAGES = {"sh", "python", "json", "toml", "yaml", "promql", "text", "mermaid", ""}
# Options of other programs that pages name in the prose.
OTHERS = {"--api-key", "--inplace", "--local-dir", "--shm-size"}
OTHERS_OF = {
    "gateway.md": {"--enable-ssrf-protection", "--kv-connector"},
    "dynamo.md": {
        *("--custom-jinja-template", "--discovery-backend", "--dyn-reasoning-parser", "--dyn-tool-call-parser"),
        *("--migration-limit", "--namespace", "--router-mode", "--router-prefill-load-scale"),
    },
}  # the same, for single pages


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def options_of(command: click.Command) -> set[str]:
    """Every spelling of the options of a command and of the commands below it."""
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union({"--help", "-h"}, *(options_of(one) for one in below))


ALL_OPTIONS = options_of(main)


def problems(line: str) -> list[str]:
    """Commands and options of `engine` in a line of shell that do not exist."""
    found = []
    for words in split_commands(line):
        command: click.Command = main
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            if name not in command.commands:
                found.append(f"engine {name}")
                break
            command = command.commands[name]
        known = options_of(command)
        used = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        found += [f"{command.name} {option}" for option in used if option not in known]
    return found


def split_commands(line: str) -> list[list[str]]:
    """The words after each `engine` of a line, up to the end of its command."""
    words = shlex.split(line, comments=True)
    starts = [place for place, word in enumerate(words) if word == "engine"]
    found = []
    for start, end in pairwise([*starts, len(words)]):
        part = words[start + 1 : end]
        stop = next((place for place, word in enumerate(part) if word in ("|", "||", "&&", ";", ">")), len(part))
        found.append(part[:stop])
    return found


@pytest.mark.parametrize(
    "line", ["engine bild x", "engine build x --qunat bf16", "true && engine run x --port=1 --prot 2"]
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert len(problems(line)) == 1


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_say_what_they_are_and_why_they_are_not_run(page: Path) -> None:
    """Indented blocks are not allowed: nothing says what they are. Servers have blocks of their own."""
    for block in blocks(page, "sh"):
        if not block.not_run:
            assert len({SERVER.match(command) is None for command in block.commands}) <= 1, block.place
    assert [block.place for block in blocks(page) if block.language not in LANGUAGES] == []
    marks = re.findall(r"^<!-- (.*?) -->\n*(.*)", page.read_text(), re.MULTILINE)
    assert [mark for mark, after in marks if not re.match(r"(not run|run with): \w", mark)] == []
    assert [mark for mark, after in marks if after not in ("```sh", "```python")] == []
    assert (
        re.findall(
            r"^\n    +\S.*", re.sub(r"^\s*[-*\d].*(\n+ +.*)*", "", prose(page), flags=re.MULTILINE), re.MULTILINE
        )
        == []
    )


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_exist(page: Path) -> None:
    lines = [(block, line) for block in blocks(page, "sh") for line in block.commands]
    assert [f"{block.place}: {found}" for block, line in lines for found in problems(line)] == []
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    commands = [text for text in inline if re.match(r"engine [a-z]", text)]
    assert [found for text in commands for found in problems(text)] == []
    options = [re.match(r"--[a-z][a-z0-9-]+", text) for text in inline]
    named = {found[0] for found in options if found}
    assert named - ALL_OPTIONS - OTHERS - OTHERS_OF.get(page.name, set()) - of_scripts() == set()


@cache
def of_scripts() -> set[str]:
    """Options of the scripts in benchmarks/ and of the worker for Dynamo, which some pages name."""
    folders = ROOT / "benchmarks", ROOT / "src/enginewright/dynamo"
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    return set(re.findall(r'"(--[a-z][a-z0-9-]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_can_be_read(page: Path) -> None:
    """tests/house/test_repository.py compares the examples of CONTRIBUTING.md, which are parts of files."""
    if page.name == "CONTRIBUTING.md":
        return
    for block in blocks(page):
        match block.language:
            case "python":
                compile(block.text, block.place, "exec")
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    """Files, and headings in them. `make docs` checks those of the site."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page_id(page)}: {target}"
        assert not anchor or anchor in anchors(path), f"{page_id(page)}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=page_id)
def test_every_page_is_in_the_site(page: Path) -> None:
    assert f": {page.name}\n" in (ROOT / "mkdocs.yml").read_text()


def test_the_diagram_of_the_runtime_shows_its_rooms() -> None:
    """Each arrow points from a room to a lower one, in the order of import-linter's contract."""
    (diagram,) = [block.text for block in blocks(ROOT / "docs/design.md", "mermaid") if "server" in block.text]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("containers") == ["enginewright.runtime"]]
    rooms = re.findall(r"\w+", " ".join(layers))
    arrows = re.findall(r"^    ([\w &]+?)(?:\[.*?\])? --> ([\w &]+)", diagram, re.MULTILINE)
    pairs = [(above, below) for left, right in arrows for above in left.split(" & ") for below in right.split(" & ")]
    assert {room for pair in pairs for room in pair} >= {room for room in rooms[:-6] if room != "engine"}
    assert [pair for pair in pairs if rooms.index(pair[0]) >= rooms.index(pair[1])] == []


def test_the_readme_is_short_and_names_no_more_families_than_there_are() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    (number,) = re.findall(r"\| more than (\d+) families:", text)
    assert len(families()) + len(wrappers()) > int(number)


@pytest.mark.parametrize("theme", chart.THEMES, ids=lambda theme: theme.name)
def test_the_chart_shows_the_results(theme: chart.Theme) -> None:
    text = (chart.FOLDER / f"throughput-{theme.name}.svg").read_text()
    (description,) = re.findall(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    expected = chart.rates(json.loads(chart.RESULTS.read_text()))
    assert json.loads(description.replace("&quot;", '"')) == expected, "run python benchmarks/chart.py"


def test_the_table_of_the_readme_shows_the_results() -> None:
    """Medians of tokens per second, to the digits that the table has."""
    speed = json.loads(chart.RESULTS.read_text())["speed"]
    names = ("cpu-w8a8", "OpenVINO INT8", "llama.cpp Q8_0", "cpu-int4", "OpenVINO INT4", "llama.cpp Q4_0")
    points = {"prompt of 512": "prefill-512", "decode after 512": "decode-512x1", "32 requests": "in-flight-32x128x64"}
    model, checked = "", 0
    for label, *cells in re.findall(
        r"^\| ([^|]+) " + r"\| ([^|]+) " * 6 + r"\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    ):
        model = next((key for text, key in (("SmolLM2", "smollm2"), ("1B shape", "llama-1b")) if text in label), model)
        point = next((value for text, value in points.items() if text in label), None)
        if point is None or not model:
            continue
        for name, cell in zip(names, cells, strict=True):
            group = f"{model}, {'8-bit' if '8' in name else '4-bit'}"
            there = chart.shown(speed[group][point]["value"])
            (rate,) = [one.rate.median for one in there.values() if one.name.removeprefix("engine ") == name]
            shown = cell.strip("* ")
            decimals = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(rate, abs=0.5001 * 10**-decimals), f"{label}, {name}"
            checked += 1
    assert checked == 36


def test_documented_python_names_exist() -> None:
    names = [
        line.removeprefix("::: ") for page in PAGES for line in page.read_text().splitlines() if line[:4] == "::: "
    ]
    assert len(names) > 5
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name
