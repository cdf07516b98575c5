"""The list of models that can be built: docs/models.md, and `engine build --list-models`."""

from pathlib import Path

from click.testing import CliRunner

from enginewright.builder.model_list import PUBLISHED_WEIGHTS, as_markdown, families, wrappers
from enginewright.builder.models import model_types
from enginewright.builder.wrappers import WRAPPERS
from enginewright.cli import main
from enginewright.cli.options import QUANTS

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == as_markdown(), "python -m enginewright.builder.model_list > docs/models.md"


def test_all_methods_are_in_the_documents() -> None:
    text = PAGE.with_name("quantize.md").read_text()
    assert [name for name in QUANTS if f"`{name}`" not in text] == []


def test_every_family_says_what_it_is() -> None:
    assert [family.model_type for family in families()] == model_types()
    assert PUBLISHED_WEIGHTS.keys() <= set(model_types())
    for family in [*families(), *wrappers()]:
        assert len(family.about) > 20 and "|" not in family.about and family.paper.startswith("https://"), family


def test_the_command_lists_them_without_a_model() -> None:
    result = CliRunner().invoke(main, ["build", "--list-models"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == [*model_types(), *WRAPPERS]
    assert any(line.startswith("phi3 ") and "LongRoPE" in line for line in lines)
