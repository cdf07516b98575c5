"""Names of files are escaped wherever people and programs read them: errors, tables, logs and metrics."""

import json

from enginewright.errors import CorruptEngineError
from enginewright.printable import printable, printable_json, printable_lines, printable_values

EVIL = "evil\n# HELP x\x1b[31m\x9b1m\u202e\udcff"
SHOWN = r"evil\n# HELP x\x1b[31m\x9b1m\u202e\udcff"


def test_what_cannot_be_seen_is_escaped() -> None:
    assert printable(EVIL) == SHOWN and printable(SHOWN) == SHOWN
    assert printable("Größe 東京") == "Größe 東京"
    assert printable_lines(f"a\tb\n{EVIL}") == f"a\\tb\n{SHOWN.replace(chr(92) + 'n', chr(10), 1)}"
    assert printable_values({EVIL: [EVIL, 1, None, {"a": (EVIL,)}]}) == {SHOWN: [SHOWN, 1, None, {"a": (SHOWN,)}]}


def test_json_stays_the_same_value() -> None:
    given = {"a": "x\x9b\u2028\U000e0041\x7f東"}
    text = printable_json(json.dumps(given, ensure_ascii=False))
    assert text.isprintable() and json.loads(text) == given and "東" in text


def test_errors_are_printable() -> None:
    error = CorruptEngineError(f"{EVIL} cannot be read", f"it is {EVIL}", f"Look.\nAt {EVIL}")
    first, *_ = str(error).split("\n")
    assert first.startswith(f"{SHOWN} cannot be read: it is evil")
    assert str(error).replace("\n", "").isprintable()
