"""Prints the matrix of layouts: how far each layout's numbers are from their references.

    python scripts/matrix.py                    every row, as a table
    python scripts/matrix.py --only CP2 PP2     the rows whose layout or model holds one of the words
    python scripts/matrix.py --json out.json    every comparison's largest errors as JSON as well

The exit status is 1 where a row is wrong or a metric is in none of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed")]

FAMILIES = ("loss", "grad", "act", "moe")
COMPARISONS = ("captured", "one_rank", "reference")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the matrix of layouts.")
    parser.add_argument(
        "--only", nargs="+", default=[], help="rows whose layout or model holds one of these words"
    )
    parser.add_argument("--json", type=Path, help="also write the largest errors to this file")
    options = parser.parse_args()
    import matrix

    def asked_for(row: matrix.Row) -> bool:
        return not options.only or any(word in f"{row.name} {row.model.name}" for word in options.only)

    rows = [row for row in matrix.ROWS if asked_for(row)]
    started, outcomes = time.monotonic(), []
    print("\n".join(table_head()))
    with tempfile.TemporaryDirectory() as folder:
        for outcome in run_rows(rows, Path(folder)):
            outcomes.append(outcome)
            print(table_line(outcome), flush=True)
    wrong = [f"{o.row.name}, {o.row.model.name}: {text}" for o in outcomes for text in o.wrong]
    if not options.only:
        missing = matrix.uncovered(set().union(*(o.tags for o in outcomes)))
        wrong += [f"{tag} is in no row" for tag in missing]
    print(f"\n{len(outcomes)} rows in {time.monotonic() - started:.0f} s")
    print("\n".join(wrong) or "every number is right in every layout")
    if options.json is not None:
        options.json.write_text(json.dumps([as_json(o) for o in outcomes], indent=1) + "\n")
    return int(bool(wrong))


def run_rows(rows: Iterable[Any], folder: Path) -> Iterator[Any]:
    """Runs and judges the rows; the plain one-rank run of each model first, for the others to be held to."""
    import matrix
    from layouts import ONE

    plain: dict[str, Any] = {}

    def run(row: Any) -> Any:
        return matrix.run_row(row, folder / f"{row.model.name} {row.name}")

    for row in rows:
        started = time.monotonic()
        if row.model.name not in plain:
            plain[row.model.name] = run(matrix.Row(layout=ONE, model=row.model))
        is_plain = row.layout == ONE and not row.variant
        outcome = matrix.judge(row, plain[row.model.name] if is_plain else run(row), plain[row.model.name])
        outcome.seconds = time.monotonic() - started
        yield outcome


def largest_errors(outcome: Any) -> dict[str, dict[str, float]]:
    """Comparison -> first word of the metrics' names -> largest relative error."""
    from quantities import Kind

    errors: dict[str, dict[str, float]] = {}
    for comparison in COMPARISONS:
        for difference in getattr(outcome, comparison):
            if difference.kind is Kind.REAL:
                family = difference.name.split("/")[0]
                found = errors.setdefault(comparison, {})
                found[family] = max(found.get(family, 0.0), difference.error)
    return errors


def table_head() -> list[str]:
    names = [
        f"{family} vs {comparison.replace('_', ' ')}" for comparison in COMPARISONS for family in FAMILIES
    ]
    cells = ["layout", "model", *names]
    return [f"| {' | '.join(cells)} |", f"|{'---|' * len(cells)}"]


def table_line(outcome: Any) -> str:
    errors = largest_errors(outcome)
    cells = [
        f"{errors[comparison][family]:.0e}" if family in errors.get(comparison, {}) else ""
        for comparison in COMPARISONS
        for family in FAMILIES
    ]
    verdict = " **wrong**" if outcome.wrong else ""
    return f"| {outcome.row.name}{verdict} | {outcome.row.model.name} | {' | '.join(cells)} |"


def as_json(outcome: Any) -> dict[str, Any]:
    return {
        "layout": outcome.row.name,
        "model": outcome.row.model.name,
        "ranks": outcome.row.layout.ranks,
        "seconds": round(outcome.seconds, 1),
        "largest_relative_errors": largest_errors(outcome),
        "compared": {name: len(getattr(outcome, name)) for name in COMPARISONS},
        "wrong": outcome.wrong,
    }


if __name__ == "__main__":
    sys.exit(main())
