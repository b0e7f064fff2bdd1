"""docs/guides/publishing.md: every command on the page runs, in its order, against real servers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guides" / "publishing.md"


def commands() -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))


@pytest.mark.slow
def test_every_command_on_the_page_runs(new_python, pypi_server, password, tmp_path):
    python = new_python(tmp_path / "python")
    # What `hub check` plays rollouts with; on a user's machine it came with the trainer.
    needed = ["pip", "install", "--quiet", "--python", python.root / "bin" / "python", ROOT / "packages" / "rollout"]
    subprocess.run([uv.find_uv_bin(), *map(str, needed)], check=True, cwd=ROOT)
    script = commands().replace("http://127.0.0.1:8765/", pypi_server.url)
    script = script.replace("change-me", password["UV_PUBLISH_PASSWORD"])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_", "PLUMBOB_", "VIRTUAL_ENV"))}
    environ = kept | {"PATH": f"{python.root / 'bin'}:{os.environ['PATH']}"}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "packages").symlink_to(ROOT / "packages")
    done = subprocess.run(["bash", "-exc", script], capture_output=True, text=True, cwd=tmp_path / "home", env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "published vf-my-env 0.1.0" in done.stdout and "published vf-my-env 0.1.1" in done.stdout
    assert done.stdout.count("installed      vf-my-env") == 2  # from the folder, and the next version
    assert python.version("vf-my-env") == "0.1.1"


def test_the_page_says_what_the_code_says():
    text = PAGE.read_text()
    for name in ("PLUMBOB_INDEX", "UV_INDEX_PLUMBOB_USERNAME", "UV_PUBLISH_PASSWORD", "--publish-url", "--from-repo"):
        assert name in text
    assert len(re.findall(r"^(hub|vf-install|uv) ", commands(), flags=re.MULTILINE)) >= 16
