"""What `doctor` prints of an examination by `plumbob.doctor`, and the page and the JSON that it writes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from plumbob.console import INTERRUPTED, UserError
from plumbob.trainer.cli.loading import first_ctrl_c
from plumbob.trainer.config.train import TrainConfig


def show(
    config: TrainConfig,
    directory: Path | None,
    *,
    everything: bool,
    model: bool,
    as_json: bool,
    html: str | None,
) -> int:
    """Examine and print. `directory`: the run directory; None before a run. Returns the exit code."""
    from plumbob.doctor import page, web_page
    from plumbob.trainer.cli.gather import of_environment, of_run
    from plumbob.trainer.training.sampling_warnings import reward_warnings

    try:
        with first_ctrl_c():
            if directory is None:
                title = f"doctor {config.env} --model {config.model}"
                x = of_environment(config, _status, everything=everything, model=model)
            else:
                title = f"doctor {directory}"
                x = of_run(directory.expanduser(), config, _status, everything=everything, model=model)
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return INTERRUPTED
    x.notes += reward_warnings(config)
    if as_json:
        print(json.dumps(x.as_json(title), indent=2))
    else:
        width = shutil.get_terminal_size((80, 24)).columns
        for line in page.lines(x, everything=everything, width=width):
            print(line)
    if html is not None:
        try:
            Path(html).write_text(web_page.render(x, title), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {html}: {error.strerror}") from None
    return x.code


def _status(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
