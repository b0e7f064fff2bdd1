"""What an attacker would try, against real servers on loopback."""

import http.server
import io
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import uv
from plumbob.console import UserError
from plumbob.hub.index.location import Location
from plumbob.hub.index.reader import Index
from plumbob.hub.index.static_index import add_files
from plumbob.hub.index.wheels import read_wheel
from plumbob.hub.install.install import Options, install, plan
from plumbob.hub.install.pins import Pin
from plumbob.hub.uv.credentials import mask


def redirections(evil: str, links: Path) -> list[dict[str, str]]:
    """Every way in which the environment can bring another index in."""
    return [
        {"UV_DEFAULT_INDEX": evil},
        {
            "UV_DEFAULT_INDEX": evil,
            "UV_INDEX": evil,
            "UV_EXTRA_INDEX_URL": evil,
            "UV_INDEX_STRATEGY": "unsafe-best-match",
        },
        {"UV_INDEX_URL": evil, "UV_EXTRA_INDEX_URL": evil, "UV_FIND_LINKS": str(links), "UV_NO_VERIFY_HASHES": "1"},
        {
            "UV_DEFAULT_INDEX": evil,
            "PIP_INDEX_URL": evil,
            "PIP_EXTRA_INDEX_URL": evil,
            "UV_OVERRIDE": str(links / "o.txt"),
        },
    ]


@pytest.mark.slow
def test_an_evil_index_never_wins_by_name(new_python, template, hub_index, evil_index, evil_links):
    python = new_python()
    for environ in redirections(evil_index.url, evil_links):
        python.uninstall(keep=template)
        python.run("vf-install", "toy==0.1.0", "--index", hub_index, **environ)
        assert (python.version("vf-toy"), python.version("plumbob-shared")) == ("0.1.0", "0.1.0")
        assert not python.is_evil()
    python.run("vf-install", "toy", "--upgrade", "--index", hub_index, **environ)
    assert python.version("vf-toy") == "0.2.0" and not python.is_evil()


def test_a_name_that_is_not_on_the_hub_is_an_error(hub_index, evil_index, evil_links, monkeypatch, tmp_path):
    wanted = ["toyy", "absent", "vf-absent==99.0"]
    for environ in redirections(evil_index.url, evil_links):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            outcomes = install(wanted, Options(index=str(hub_index)), tmp_path)
            assert [o.status for o in outcomes] == ["failed"] * 3 and all(o.user_error for o in outcomes)
            assert "did you mean 'toy'?" in outcomes[0].detail
            (unnamed,) = install(["absent"], Options(), tmp_path)
            assert "no package index is set" in unnamed.detail
    assert evil_index.requests == []


def test_a_shared_library_that_is_not_on_the_hub_is_an_error(new_python, make_wheel, evil_index, tmp_path):
    add_files([make_wheel("vf-leaky", "0.1.0", ("plumbob-missing>=0.1",), "leaky")], tmp_path / "hub")
    python = new_python()
    done = python.run("vf-install", "leaky", "--index", tmp_path / "hub", code=2, UV_DEFAULT_INDEX=evil_index.url)
    assert "needs plumbob-missing, which is neither installed nor on" in done.stdout
    assert "never taken from a public index" in done.stdout
    assert evil_index.requests == [] and not python.is_evil()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["path", "folder", "repository", "wheel", "nearby"])
def test_no_other_source_lets_it_in_either(
    source, new_python, make_project, make_wheel, evil_index, hub_index, tmp_path
):
    """The environment comes from here, its shared library would come from the public index."""
    here = tmp_path / "here"
    make_project(here / "environments" / "mine", "vf-mine", needs=["plumbob-shared>=0.1"], environment="mine")
    subprocess.run(["git", "init", "--quiet", str(here)], check=True)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(here), "add", "."], check=True)
    subprocess.run(["git", "-C", str(here), *identity, "commit", "--quiet", "-m", "one"], check=True)
    wheel = make_wheel("vf-mine", "0.1.0", ("plumbob-shared>=0.1",), "mine")
    command, options = {
        "path": (["./environments/mine"], Options()),
        "folder": (["mine", "--path", "environments"], Options(path=here / "environments")),
        "repository": (["mine", "--from-repo", "--repo", str(here)], Options(from_repo=True, repo=str(here))),
        "wheel": ([str(wheel)], Options()),
        "nearby": (["mine"], Options()),
    }[source]
    (refused,) = install(command[:1], options, here)
    assert "needs plumbob-shared>=0.1, which is not installed; give the --index that has it" in refused.detail
    python = new_python()
    public = evil_index.url
    # A build needs its backend, which the evil index does not have.
    found = {"UV_DEFAULT_INDEX": public} if source == "wheel" else {"UV_INDEX": public, "UV_EXTRA_INDEX_URL": public}
    python.run("vf-install", *command, cwd=here, PLUMBOB_INDEX=str(hub_index), **found)
    assert python.version("plumbob-shared") == "0.1.0" and not python.is_evil()


@pytest.mark.slow
def test_an_explicit_index_of_the_project_and_what_it_records(
    new_python, make_project, hub_index, serve, evil_index, tmp_path
):
    """uv ignores an `explicit` index for names on its command line; by itself it would have taken version 99."""
    server = serve(hub_index)
    home = make_project(tmp_path / "project", "my-project")
    table = f'[[tool.uv.index]]\nname = "plumbob"\nurl = "{server.url}"\nexplicit = true\n'
    (home / "pyproject.toml").write_text((home / "pyproject.toml").read_text() + table)
    bare = new_python()
    uv_alone = [uv.find_uv_bin(), "pip", "install", "--python", str(bare.root / "bin" / "python"), "vf-toy"]
    subprocess.run([*uv_alone, "--default-index", evil_index.url], cwd=home, check=True, capture_output=True)
    assert bare.version("vf-toy") == "99.0"  # the danger is real

    python = new_python()
    evil = {"UV_DEFAULT_INDEX": evil_index.url, "UV_INDEX": evil_index.url, "UV_EXTRA_INDEX_URL": evil_index.url}
    python.run("vf-install", "toy", "--save", cwd=home, **evil)
    assert python.version("vf-toy") == "0.2.0" and not python.is_evil()
    assert evil_index.url not in (home / "pyproject.toml").read_text()
    for _ in range(2):
        locked = (home / "uv.lock").read_text()
        assert re.search(r'name = "plumbob-shared"\nversion = "0.1.0"', locked) and evil_index.url not in locked
        python.run("uv", "lock", "--upgrade", cwd=home, UV_DEFAULT_INDEX=evil_index.url)


def tamper(wheel: Path) -> None:
    """Change a wheel's code and keep its name, as whoever owns the server could."""
    with zipfile.ZipFile(wheel) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data + b"\nEVIL = 3\n" if name.endswith("__init__.py") else data)


@pytest.mark.slow
@pytest.mark.parametrize("tampered", ["vf_toy-0.1.0-py3-none-any.whl", "plumbob_shared-0.1.0-py3-none-any.whl"])
def test_a_tampered_wheel_is_refused(tampered, new_python, hub_index, serve):
    tamper(hub_index / "files" / tampered)
    python = new_python()
    done = python.run(
        "vf-install", "toy==0.1.0", "--index", serve(hub_index).url, "--upgrade", code=None, UV_NO_CACHE="1"
    )
    assert done.returncode in (1, 2) and "failed" in done.stdout
    assert "is refused: its sha256 is not the one" in done.stdout or "Hash mismatch" in done.stdout
    assert python.version("vf-toy") is None and not python.is_evil()


def test_uv_itself_refuses_bytes_that_are_not_pinned(new_python, hub_index):
    """Whatever changes between our look and uv's: the hash that we saw is the hash that uv insists on."""
    python = new_python()
    index = Location("plumbob", (hub_index / "simple").as_uri() + "/")
    pins = [Pin("vf-other", "1.0", ("0" * 64,))]
    for given in ({"wheels": [hub_index / "files"]}, {"index": index}):
        command = plan([], pins, uv=uv.find_uv_bin(), python=str(python.root / "bin" / "python"), **given)
        done = subprocess.run(command.argv, input=command.stdin, capture_output=True, text=True)
        assert done.returncode != 0 and "hash" in done.stderr.lower()
        assert python.version("vf-other") is None


@pytest.mark.parametrize(
    "member", ["../../outside.py", "/tmp/outside.py", "vf_other/../../../outside.py", "..\\outside.py"]
)
def test_an_archive_cannot_write_outside(member, new_python, make_wheel, tmp_path):
    wheel = tmp_path / "wheels" / "vf_other-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    shutil.copy(make_wheel("vf-other", "1.0", (), "other"), wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(member, "EVIL = 4")
    with pytest.raises(UserError, match="would be written outside the target"):
        add_files([wheel], tmp_path / "hub")
    python = new_python()
    assert "would be written outside" in python.run("vf-install", wheel, code=2).stdout
    assert not list(tmp_path.rglob("outside.py")) and not Path("/tmp/outside.py").exists()


def test_a_wheel_that_lies_about_its_name_is_refused(make_wheel, tmp_path):
    data = make_wheel("vf-other", "1.0", (), "other").read_bytes()
    with pytest.raises(UserError, match="not a readable wheel|says that it is"):
        read_wheel(data, "vf_toy-9.0-py3-none-any.whl")
    with pytest.raises(UserError, match="says that it is vf-other 1.0"):
        read_wheel(data, "vf_other-9.0-py3-none-any.whl")
    with pytest.raises(UserError, match="not a readable wheel"):
        read_wheel(data[:200], "vf_other-1.0-py3-none-any.whl")
    with zipfile.ZipFile(empty := io.BytesIO(), "w"):
        pass
    with pytest.raises(UserError, match="not a readable wheel"):
        read_wheel(empty.getvalue(), "vf_other-1.0-py3-none-any.whl")


def test_a_page_cannot_send_us_to_the_disk_or_our_password_elsewhere(tmp_path, serve, monkeypatch):
    monkeypatch.setenv("UV_INDEX_PLUMBOB_USERNAME", "ci")
    monkeypatch.setenv("UV_INDEX_PLUMBOB_PASSWORD", "s3cret")
    secret = tmp_path / "vf_toy-1.0-py3-none-any.whl"
    secret.write_text("private")
    other = serve(tmp_path)
    page = tmp_path / "hub" / "simple" / "vf-toy"
    page.mkdir(parents=True)
    (page / "index.html").write_text(
        f'<a href="{secret.as_uri()}">vf_toy-1.0-py3-none-any.whl</a>'
        f'<a href="{other.url.removesuffix("simple/")}{secret.name}">vf_toy-1.0-py3-none-any.whl</a>'
    )
    index = Index(Location("plumbob", serve(tmp_path / "hub").url))
    disk, elsewhere = index.files("vf-toy")
    assert index.read(disk.url) is None
    assert index.read(elsewhere.url) == b"private"
    sent = index._session.prepare_request
    import requests

    assert "Authorization" in sent(requests.Request("GET", index.location.url)).headers
    assert "Authorization" not in sent(requests.Request("GET", elsewhere.url)).headers


@pytest.mark.slow
def test_an_unknown_name_that_is_redirected_to_a_public_index_stays_unknown(new_python, evil_index, serve, tmp_path):
    """pypiserver does this unless it is told not to."""

    class Fallback(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            self.send_response(303)
            self.send_header("Location", evil_index.url + self.path.removeprefix("/simple/"))
            self.end_headers()

    python = new_python()
    done = python.run("vf-install", "absent", "--index", serve(tmp_path, Fallback).url, code=2)
    assert "failed" in done.stdout and not python.is_evil()
    assert evil_index.requests == []


@pytest.mark.parametrize("url", ["http://ci:s3cret@127.0.0.1:1/simple/", "https://token@example.org/simple/"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url, make_project, tmp_path, monkeypatch, ended):
    from plumbob.hub.cli import hub as cli
    from plumbob.hub.cli import vf_install as install_cli

    monkeypatch.chdir(make_project(tmp_path / "project", "vf-mine", environment="mine"))
    commands = [(install_cli.app, ["toy"]), *((cli.app, [c, "toy"]) for c in ("search", "info", "publish"))]
    for app, command in commands:
        code, out, err = ended("command", app, *command, "--index", url)
        said = out + err
        assert code == 2 and "holds credentials" in said and "UV_INDEX_<NAME>_PASSWORD" in said
        assert "s3cret" not in said and "token" not in said


def test_secrets_are_masked_in_every_form():
    environ = {"UV_PUBLISH_PASSWORD": "p/ss", "UV_PUBLISH_USERNAME": "ci", "UV_INDEX_X_PASSWORD": "hidden",
               "UV_DEFAULT_INDEX": "https://me:mirror-secret@mirror.example.org/simple"}  # fmt: skip
    said = "p/ss p%2Fss Y2k6cC9zcw== hidden https://me:mirror-secret@mirror.example.org mirror-secret git@github.com"
    assert mask(said, environ) == "*** *** *** *** https://***@mirror.example.org *** git@github.com"
