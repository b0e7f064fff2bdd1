"""`hub publish` to a pypiserver with a password, and to a static index."""

import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.hub.index.location import Location, locate_target
from plumbob.hub.publish.publish import plan_upload, publish, publishing_to


@pytest.mark.slow
def test_published_to_a_server_with_a_password_and_installed_from_it(
    hub, new_python, make_project, pypi_server, password, tmp_path
):
    index = f"{pypi_server.url}simple/"
    toy = make_project(tmp_path / "toy", "vf-toy", "0.1.0", ["plumbob-shared>=0.1,<0.2"], "toy")
    shared = make_project(tmp_path / "shared", "plumbob-shared")
    publishing = {k: v for k, v in password.items() if k.startswith("UV_PUBLISH")}
    done = hub("publish", toy, shared, "--index", index, **publishing)
    assert "published vf-toy 0.1.0" in done.stdout and "published plumbob-shared 0.1.0" in done.stdout
    line = f"vf-install toy==0.1.0 --index {index}"
    assert f"install it: {line}" in done.stdout

    again = hub("publish", toy, "--index", index, **publishing)
    assert "already published, unchanged: vf-toy 0.1.0" in again.stdout
    (toy / "src" / "vf_toy" / "__init__.py").write_text("class Toy:\n    changed = True\n")
    changed = hub("publish", toy, "--index", index, code=2, **publishing)
    assert (
        "vf-toy 0.1.0 is on" in changed.stderr
        and "different bytes; give the changed package a new version" in changed.stderr
    )

    user = new_python()
    reading = {k: v for k, v in password.items() if k.startswith("UV_INDEX")}
    locked_out = user.run(*line.split(), code=2)
    assert "answers 401; set UV_INDEX_PLUMBOB_USERNAME and UV_INDEX_PLUMBOB_PASSWORD" in locked_out.stdout
    user.run(*line.split(), **reading)
    assert user.version("vf-toy") == "0.1.0" and user.version("plumbob-shared") == "0.1.0"

    home = make_project(tmp_path / "project", "my-project")
    user.run(*line.split(), "--upgrade", "--save", cwd=home, **reading)
    for written in ("pyproject.toml", "uv.lock"):
        text = (home / written).read_text()
        assert "127.0.0.1" in text and password["UV_INDEX_PLUMBOB_PASSWORD"] not in text and "ci@" not in text

    searched = hub("search", "to", "--index", index, **reading)
    assert searched.stdout == "toy  vf-toy 0.1.0  A toy called vf-toy\n"
    assert "has no catalog: only names were searched" in searched.stderr
    assert "versions      0.1.0" in hub("info", "toy", "--index", index, **reading).stdout


def test_a_wrong_password_is_one_sentence(hub, make_project, pypi_server, password, tmp_path):
    other = make_project(tmp_path / "other", "vf-other", environment="other")
    wrong = {"UV_PUBLISH_USERNAME": "ci", "UV_PUBLISH_PASSWORD": "wrong-guess"}
    reading = {k: v for k, v in password.items() if k.startswith("UV_INDEX")}
    done = hub("publish", other, "--index", f"{pypi_server.url}simple/", code=2, **wrong, **reading)
    assert "refused the upload" in done.stderr and "wrong-guess" not in done.stderr


@pytest.mark.slow
def test_a_killed_publish_leaves_what_was_there_and_the_next_one_finishes(
    hub, new_python, make_project, pypi_server, password, tmp_path
):
    index = f"{pypi_server.url}simple/"
    python = new_python()
    toy = make_project(tmp_path / "toy", "vf-toy", "0.1.0", environment="toy")
    hub("publish", toy, "--index", index, **password)
    packages = tmp_path / "pypiserver"
    before = {p.name: p.read_bytes() for p in packages.iterdir()}
    make_project(toy, "vf-toy", "0.2.0", environment="toy")
    (toy / "src" / "vf_toy" / "data.bin").write_bytes(os.urandom(12_000_000))
    code = (
        "from plumbob.console.app import run_app; from plumbob.hub.cli import hub; from plumbob.hub.publish import publish;"
        "publish.default_gate = lambda *_: None; run_app('hub', hub.app)"
    )
    command = [python.root / "bin" / "python", "-c", code, "publish", toy, "--index", index]
    environ = {**os.environ, **password}
    process = subprocess.Popen(
        command, env=environ, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert any(line.startswith(b"Uploading") for line in process.stderr)  # reads until then
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert {name: (packages / name).read_bytes() for name in before} == before
    assert "vf-toy 0.1.0" in python.run("vf-install", "toy==0.1.0", "--index", index, **password).stdout
    # pypiserver at times keeps a body that was cut off; no client can mend that, so hub refuses it until it is removed.
    for kept in packages.glob("*0.2.0*"):
        if not (zipfile.is_zipfile(kept) or tarfile.is_tarfile(kept)):
            kept.unlink()
    hub("publish", toy, "--index", index, **password)
    assert "vf-toy 0.2.0" in python.run("vf-install", "toy", "--upgrade", "--index", index, **password).stdout


def test_published_to_a_folder(hub, new_python, make_project, tmp_path):
    python = new_python()
    make_project(tmp_path / "other", "vf-other", "1.0", environment="other")
    done = hub("publish", "other", "--index", "./hub", cwd=tmp_path)
    assert "published vf-other 1.0" in done.stdout
    line = done.stdout.splitlines()[1].removeprefix("install it: ")
    assert "installed      vf-other 1.0" in python.run(*line.split()).stdout
    assert "already published" in hub("publish", "other", "--index", "./hub", cwd=tmp_path).stdout
    assert sorted(p.name for p in (tmp_path / "hub" / "files").iterdir()) == [
        "vf_other-1.0-py3-none-any.whl",
        "vf_other-1.0-py3-none-any.whl.metadata",
        "vf_other-1.0.tar.gz",
    ]


def test_the_gate_and_addresses_keep_an_environment_back(make_project, tmp_path):
    location = publishing_to(locate_target("./hub", tmp_path), None)
    toy = make_project(tmp_path / "toy", "vf-toy", environment="toy")
    library = make_project(tmp_path / "shared", "plumbob-shared")
    seen = []

    def gate(path):
        seen.append(path)
        return ["its oracle scores 0.5", "its README is empty"]

    with pytest.raises(UserError, match="toy is not published: its oracle scores 0.5; its README is empty"):
        publish([library, toy], location, gate)
    assert seen == [toy] and not (tmp_path / "hub").exists()
    with pytest.raises(UserError, match="cannot reach http://127.0.0.1:9/simple/vf-toy/"):
        publish([toy], publishing_to(locate_target("http://127.0.0.1:9/simple/", tmp_path), None), gate)
    assert seen == [toy]  # nothing is checked for a server that does not answer
    make_project(toy, "vf-toy", needs=["six @ https://example.org/six-1.0-py3-none-any.whl"], environment="toy")
    with pytest.raises(UserError, match="it needs six ?@ https.*, and a published package may not depend on a URL"):
        publish([toy], location, None)
    assert not (tmp_path / "hub").exists()


def test_it_builds_without_sources(make_project, tmp_path):
    """A dependency that only this workspace's sources can find would be missing for everybody else."""
    toy = make_project(tmp_path / "toy", "vf-toy", environment="toy")
    text = (toy / "pyproject.toml").read_text().replace("uv_build>=0.9,<0.14", "a-backend-9f3b")
    (toy / "pyproject.toml").write_text(text + '\n[tool.uv.sources]\na-backend-9f3b = { path = "../backend" }\n')
    with pytest.raises(UserError, match="toy is not published, because its build failed: .*a-backend-9f3b"):
        publish([toy], publishing_to(locate_target("./hub", tmp_path), None), None)


def test_where_uploads_go():
    server = Location("plumbob", "https://hub.example.org/simple/")
    assert publishing_to(server, None).publish_url == "https://hub.example.org/"
    assert publishing_to(server, "https://up.example.org/").publish_url == "https://up.example.org/"
    with pytest.raises(UserError, match="holds credentials"):
        publishing_to(server, "https://ci:pw@up.example.org/")


def test_a_trusted_publisher_s_token_is_asked_for_only_where_one_can_be_had(monkeypatch):
    location = publishing_to(Location("plumbob", "https://hub.example.org/simple/"), None)

    def asked() -> str:
        return plan_upload(["a.whl"], location, uv="uv").argv[-2]

    for name in ("ACTIONS_ID_TOKEN_REQUEST_URL", "UV_PUBLISH_TOKEN", "UV_PUBLISH_USERNAME", "UV_PUBLISH_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    assert asked() == "never"
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", "https://ci.example.org/token")
    assert asked() == "automatic"
    monkeypatch.setenv("UV_PUBLISH_TOKEN", "t")
    assert asked() == "never"


def test_a_dry_run_of_a_publish_can_be_pasted(hub, make_project, tmp_path, monkeypatch):
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_URL", raising=False)
    make_project(tmp_path / "other", "vf-other", "1.0", environment="other")
    shown = hub("publish", "other", "--index", "./hub", "--dry-run", cwd=tmp_path).stdout
    assert "build --no-sources" in shown and not (tmp_path / "hub").exists()
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", shown], check=True, capture_output=True, cwd=tmp_path, env=environ)
    assert (tmp_path / "hub" / "catalog.json").exists()
    server = hub("publish", "other", "--index", "http://127.0.0.1:9/simple/", "--dry-run", cwd=tmp_path).stdout
    assert (
        "--publish-url http://127.0.0.1:9/ --check-url http://127.0.0.1:9/simple/ --trusted-publishing never" in server
    )
