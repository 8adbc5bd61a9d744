"""``python -m engine.data check FILE``: read a file of training rows as an upload does, and print its report.

Exit code 0 if the file is valid, 1 if it is not, 2 for a wrong command line.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from engine.data.ingest import validate_file


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.data")
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="validate a file of rows: JSONL, JSON, CSV or Parquet, compressed or not")
    check.add_argument("file", type=Path)
    check.add_argument("--json", action="store_true", help="print the whole report")
    args = parser.parse_args(argv)
    if not args.file.is_file():
        parser.error(f"{args.file} is no file")
    report = validate_file(args.file, filename=args.file.name).report
    if args.json:
        sys.stdout.write(json.dumps(asdict(report), indent=2, default=str) + "\n")
        return 0 if report.valid else 1
    lines = [report.verdict, f"{report.rows} rows, {report.examples} kept"]
    lines += [f"row {error.row}: {error.message}" for error in report.errors[:20]]
    lines += [f"warning: {warning['message']}" for warning in report.warnings]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if report.valid else 1


if __name__ == "__main__":
    sys.exit(main())
