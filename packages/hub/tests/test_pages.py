"""docs/guides/own_project.md and publishing.md: their commands run, from an index on this machine, with uv and with pip alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv
from plumbob.hub.index.static_index import add_files

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guides" / "own_project.md"
PUBLISHING = PAGE.with_name("publishing.md")
MEMBERS = [
    *(f"packages/{name}" for name in ("console", "doctor", "hub", "retrieval", "rollout")),
    "trainer",
    "environments/lookup",
]
SMALL = "train lookup --max-steps 1 --batch-size 16 --gradient-accumulation-steps 1 --eval-examples 4"
OURS = re.compile(r"(plumbob|vf_|_?_?editable_|_plumbob|\\.)", re.IGNORECASE)


def commands(language: str, url: str) -> str:
    """The commands of the page's blocks in one language, for the index at `url` and with less training."""
    script = "\n".join(re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))
    script = script.replace("https://hub.example.org/simple/", url)
    return script.replace("evaluate lookup --oracle", "evaluate lookup --oracle -n 8").replace(
        "train lookup\n", f"{SMALL}\n"
    )


@pytest.fixture(scope="module")
def own_index(tmp_path_factory) -> Path:
    """An index with the libraries, the trainer and vf-lookup, as they are in this checkout."""
    out, index = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("index") / "hub"
    for member in MEMBERS:
        command = [uv.find_uv_bin(), "build", "--quiet", "--wheel", "--no-sources", "--out-dir", out, ROOT / member]
        subprocess.run(command, check=True)
    add_files(out.glob("*.whl"), index)
    return index


def run(script: str, home: Path, **environ: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_", "PLUMBOB_", "VIRTUAL_ENV"))}
    kept |= {k: v for k, v in os.environ.items() if k in ("UV_CACHE_DIR", "PIP_CERT")}
    kept["PATH"] = f"{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-exc", script], capture_output=True, text=True, cwd=home, env=kept | environ)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_with_uv(own_index, serve, tmp_path):
    server = serve(own_index)
    (tmp_path / "project").mkdir()
    said = run(commands("sh", server.url), tmp_path / "project", UV_PYTHON=sys.executable)
    assert f"installed      vf-lookup 0.1.0 from {server.url}" in said
    assert "held-out reward" in said and said.count("lookup  vf-lookup 0.1.0  ") == 2  # listed, and found
    lock = (tmp_path / "project" / "uv.lock").read_text()
    assert re.search(r'name = "vf-lookup"\nversion = "0.1.0"\nsource = \{ registry = "http://127.0.0.1', lock)
    again = f"uv sync --locked --python {sys.executable} && uv run --no-sync hub list"
    assert "vf-lookup 0.1.0" in run(again, tmp_path / "project")


@pytest.mark.slow
@pytest.mark.long
def test_with_pip_alone(own_index, serve, tmp_path):
    """Other people's packages are taken from this checkout's environment, so that pip downloads none of them."""
    server = serve(own_index)
    site = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    others = tmp_path / "others"
    others.mkdir()
    for path in site.iterdir():
        if not OURS.match(path.name):
            (others / path.name).symlink_to(path)
    first, _, rest = commands("bash", server.url).partition("\n")
    assert first == "python3 -m venv .venv"
    run(f"{sys.executable} -m venv .venv", tmp_path)
    own = next((tmp_path / ".venv" / "lib").glob("python*/site-packages"))
    for path in own.glob("setuptools*"):  # older than torch's requirement, and the newer one is among the others
        shutil.rmtree(path)
    (own / "others.pth").write_text(f"{others}\n")
    said = run(rest, tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple/", PIP_CONFIG_FILE=os.devnull)
    assert "held-out reward" in said
    installed = {path.name.partition("-")[0] for path in own.glob("*.dist-info")}
    assert installed >= {
        "plumbob_console",
        "plumbob_doctor",
        "plumbob_hub",
        "plumbob_rollout",
        "plumbob_trainer",
        "vf_lookup",
    }


def test_the_page_says_how():
    text = PAGE.read_text()
    for words in ("pip download --no-deps", "--torch-backend cpu", "vf-install lookup --save", "python3-venv"):
        assert words in text


def publishing() -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", PUBLISHING.read_text(), flags=re.MULTILINE | re.DOTALL))


@pytest.mark.slow
def test_every_command_on_the_page_runs(new_python, pypi_server, password, tmp_path):
    python = new_python(tmp_path / "python")
    # What `hub check` plays rollouts with; on a user's machine it came with the trainer.
    needed = ["pip", "install", "--quiet", "--python", python.root / "bin" / "python", ROOT / "packages" / "rollout"]
    subprocess.run([uv.find_uv_bin(), *map(str, needed)], check=True, cwd=ROOT)
    script = publishing().replace("http://127.0.0.1:8765/", pypi_server.url)
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
    text = PUBLISHING.read_text()
    for name in ("PLUMBOB_INDEX", "UV_INDEX_PLUMBOB_USERNAME", "UV_PUBLISH_PASSWORD", "--publish-url", "--from-repo"):
        assert name in text
    assert len(re.findall(r"^(hub|vf-install|uv) ", publishing(), flags=re.MULTILINE)) >= 16
