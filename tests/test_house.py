"""The house that newcomers walk through: folders that fit one glance, and a map whose rooms exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import unbounded

PACKAGE = Path(unbounded.__file__).parent
REPOSITORY = Path(__file__).parent.parent
MAP = REPOSITORY / "docs" / "map.md"
MAX_FILES = 12


def test_no_folder_of_the_package_has_more_than_twelve_files() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_every_file_that_the_map_names_exists() -> None:
    rows = [row for row in MAP.read_text().splitlines() if row.startswith("| ") and not row.startswith("| the change")]
    assert len(rows) >= 10
    missing = []
    for row in rows:
        folder, named = Path(), re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", row)
        assert named, row
        for name in named:
            found = [place for place in (PACKAGE / name, REPOSITORY / name, folder / name) if place.exists()]
            if found:  # a name alone is of the folder of the one before it
                folder = found[0] if found[0].is_dir() else found[0].parent
            else:
                missing.append(name)
    assert not missing
