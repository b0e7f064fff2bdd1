"""`python -m plumbob.doctor`: what the records of a run say, after it or while it goes on. No trainer is needed."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.console.files import check_output

HELP = """Find out why a training run does not learn, from the records of its steps.

FOLDER is an output folder of TRL in which `plumbob.doctor.attach` has written records, a file or folder of records that a trainer
of your own has written, or a folder in which vf-eval of verifiers has saved its rollouts. `trl SCRIPT.py ARGS` runs a script of TRL
with every trainer in it watched. `validate FILE` says whether records are as docs/reference/records.md wants them.

Exit code 0: no check failed. 1: a cause or a symptom was found. 2: there are no records, or a check was not completed.
"""


def main(given: Sequence[str] | None = None, name: str = "python -m plumbob.doctor") -> int:
    """The command; returns its exit code. `name`: how its user calls it."""
    words = list(sys.argv[1:] if given is None else given)
    command = COMMANDS.get(words[0] if words else "")
    try:
        return read(words, name) if command is None else command(words[1:], f"{name} {words[0]}")
    except (UserError, ValueError) as error:
        print(f"{name.split()[-1]}: {error}", file=sys.stderr)
        return 2


def read(words: Sequence[str], name: str) -> int:
    """What records say, as text, JSON or a page."""
    parser = argparse.ArgumentParser(prog=name, description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="file or folder with records, or the output folder that it is in")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--all", action="store_true", help="print each check on a line of its own")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the findings to an HTML page")
    trial = "try the first remedy, if it is a value of an option: a few steps, three seeds"
    parser.add_argument("--confirm", action="store_true", help=trial)
    given = parser.parse_args(words)
    from plumbob.doctor.format import read_right
    from plumbob.doctor.page import PAGE, lines, render

    if given.html is not None:
        check_output("--html", given.html, PAGE[:9].encode())

    saved = given.folder.name == "traces.jsonl" or (given.folder / "traces.jsonl").is_file()
    next(iter(() if saved else read_right(given.folder)), None)  # a mistake is told before torch is imported
    from plumbob.doctor.saved import examination
    from plumbob.doctor.trl.reading import Reading, of_folder

    title = f"plumbob.doctor {given.folder}"
    reading = Reading() if saved else of_folder(given.folder)
    x = examination(given.folder) if saved else reading.examination()
    if given.html is not None:
        given.html.write_text(render(x, title), encoding="utf-8")
    if given.json:
        print(json.dumps(x.as_json(title), indent=2))
    else:
        print("\n".join(lines(x, everything=given.all, width=shutil.get_terminal_size((80, 24)).columns)))
    if given.confirm:
        print()
        for line in _confirmed(reading, x):
            print(line, flush=True)
    return x.code


def _confirmed(reading: Any, x: Any) -> Iterator[str]:
    from plumbob.doctor.confirm import confirm, trial_of
    from plumbob.doctor.trl.reading import COURSE

    tried = trial_of(x, reading.options)
    if isinstance(tried, str):
        yield tried
        return
    if not reading.script:
        yield f"{tried[0]}: cannot be tried: the run was not started as `python SCRIPT.py`."
        return
    command = f"python -m plumbob.doctor arm {shlex.quote(str(reading.folder / COURSE))}"
    # What was run before of another script, or of other options, is not taken for this one.
    own = Path(reading.script[0]).read_bytes() + str((reading.script, reading.options)).encode()
    key = hashlib.sha256(own).hexdigest()[:8]
    yield from confirm(tried, reading.folder / f"confirm-{key}", command=command, env="script", model="-")


def _of_script(words: Sequence[str], name: str) -> int:
    from plumbob.doctor.trl import script

    return getattr(script, name.split()[-1])(words, name)


def validate(words: Sequence[str], name: str) -> int:
    """Exit code 0: all records are as documented. 2: a sentence for each mistake is printed."""
    from plumbob.doctor.format import read_all

    parser = argparse.ArgumentParser(prog=name, description=validate.__doc__)
    parser.add_argument("file", type=Path, help="step_*.npz, or a .jsonl file with one record a line, or their folder")
    file = parser.parse_args(words).file
    count = wrong = 0
    for where, record in read_all(file):
        count += 1
        if isinstance(record, list):
            wrong += 1
            print("\n".join(f"{where}: {mistake}" for mistake in record), file=sys.stderr)
        else:
            print(f"{where}: step {record.step + 1}, {len(record.rows)} rows")
    if not count:
        raise UserError(f"{file} has no records: it is neither step_*.npz, nor .jsonl, nor a folder of these")
    return 2 if wrong else 0


def takes(words: Sequence[str]) -> bool:
    """Whether words of a command line are for `main`: one of its commands, or a path with records that is no run directory."""
    path = Path(words[0]) if words else Path("/")
    if not words or words[0] in COMMANDS or (path / "config.toml").is_file() or not path.exists():
        return bool(words) and words[0] in COMMANDS
    from plumbob.doctor.format import files_of

    # A folder of an environment's data may hold files of JSON lines, too.
    found = files_of(path)
    return path.is_file() or any(one.suffix == ".npz" for one in found) or path / "traces.jsonl" in found


COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {"validate": validate, "trl": _of_script, "arm": _of_script}
"""First word -> the command; anything else is a folder of records."""

if __name__ == "__main__":
    sys.exit(main())
