"""`python -m plumbob.doctor FOLDER`: what the records of a run of TRL say, after it or while it goes on. TRL is not needed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path


def main() -> int:
    """Exit code 0: no check failed. 1: a cause or a symptom was found. 2: there are no records, or a check was not completed."""
    parser = argparse.ArgumentParser(prog="python -m plumbob.doctor", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="folder with step_*.npz, or the output folder that it is in")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--all", action="store_true", help="print each check on a line of its own")
    given = parser.parse_args()
    from plumbob.doctor.page import lines
    from plumbob.doctor.trl.reading import of_folder

    try:
        x = of_folder(given.folder).examination()
    except ValueError as error:
        print(f"plumbob.doctor: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(x.as_json(f"plumbob.doctor {given.folder}"), indent=2))
    else:
        print("\n".join(lines(x, everything=given.all, width=shutil.get_terminal_size((80, 24)).columns)))
    return x.code


if __name__ == "__main__":
    sys.exit(main())
