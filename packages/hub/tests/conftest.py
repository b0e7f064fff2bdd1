"""Real servers on loopback, real wheels, clean virtual environments."""

import atexit
import base64
import functools
import hashlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import uv
from plumbob.hub.index.static_index import add_files

HUB = Path(__file__).parents[1]
PASSWORD = "s3cret-of-ci"


@dataclass
class Server:
    """A running server: its simple index, and the log of what was asked of it."""

    url: str
    requests: list[str]


@functools.cache
def uv_cache() -> str:
    """The folder of uv's cache, so that what is downloaded is kept while tests have other caches of their own."""
    return subprocess.run([uv.find_uv_bin(), "cache", "dir"], check=True, capture_output=True, text=True).stdout.strip()


@functools.cache
def cache_home() -> str:
    """A folder for the caches of all tests of this process."""
    folder = tempfile.mkdtemp(prefix="plumbob-hub-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@dataclass
class Python:
    """A clean virtual environment with plumbob-hub in it."""

    root: Path

    @property
    def site(self) -> Path:
        return next((self.root / "lib").glob("python*/site-packages"))

    @staticmethod
    def environ() -> dict[str, str]:
        """A neutral environment, with uv's cache as it is and an empty one of plumbob's."""
        ours = ("UV_", "PIP_", "PLUMBOB_", "VIRTUAL_ENV", "COLUMNS")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return {**kept, "UV_CACHE_DIR": uv_cache(), "XDG_CACHE_HOME": cache_home()}

    def run(self, *command: str | Path, cwd: Path | None = None, code: int | None = 0, **environ: str):
        """Run one of its programs, in a neutral environment. `code` is the exit code to insist on."""
        program, *arguments = command
        done = subprocess.run(
            [self.root / "bin" / program, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd or self.root,
            env=self.environ() | environ,
        )
        if code is not None:
            assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done

    def version(self, distribution: str) -> str | None:
        """The version that is installed."""
        name = distribution.replace("-", "_")
        found = sorted(self.site.glob(f"{name}-*.dist-info"))
        return found[0].name.removeprefix(f"{name}-").removesuffix(".dist-info") if found else None

    def uninstall(self, keep: "Python") -> None:
        """Remove whatever `keep` does not have."""
        kept = set(os.listdir(keep.site))
        for path in self.site.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def is_evil(self) -> bool:
        """Whether any code of the evil index was installed."""
        return any(
            "EVIL" in f.read_text() for f in self.site.glob("*/__init__.py") if f.parent.name[:3] in ("vf_", "plu")
        )


def project(root: Path, name: str, version: str = "0.1.0", needs=(), environment: str | None = None, body: str = ""):
    """A package built by uv_build. `environment` is the name of its entry point; libraries have none."""
    module = name.replace("-", "_")
    source = root / "src" / module
    source.mkdir(parents=True, exist_ok=True)
    (source / "__init__.py").write_text(f"{body}\nclass Toy:\n    pass\n")
    (root / "README.md").write_text(f"# {name}\n\nAn environment about penguins.\n")
    points = f'[project.entry-points."plumbob.environments"]\n{environment} = "{module}:Toy"\n' if environment else ""
    (root / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\ndescription = "A toy called {name}"\nreadme = "README.md"\n'
        f'requires-python = ">=3.11,<3.14"\nkeywords = ["toy", "test"]\ndependencies = {list(needs)!r}\n{points}\n'
        '[build-system]\nrequires = ["uv_build>=0.9,<0.14"]\nbuild-backend = "uv_build"\n'
    )
    return root


def build(source: Path, out: Path) -> Path:
    """The wheel of a package."""
    command = [
        uv.find_uv_bin(),
        "build",
        "--quiet",
        "--wheel",
        "--no-create-gitignore",
        "--out-dir",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def make_wheel(tmp_path_factory):
    """Build a wheel, once for each set of arguments."""

    @functools.cache
    def make(name: str, version: str = "0.1.0", needs=(), environment: str | None = None, body: str = "") -> Path:
        root = tmp_path_factory.mktemp("wheel")
        return build(project(root / "source", name, version, needs, environment, body), root / "dist")

    return make


@pytest.fixture
def make_project():
    return project


@pytest.fixture
def repack(tmp_path):
    """Copy a wheel with other members added, each of them listed in RECORD with its hash; "{info}" is its dist-info."""

    def add(wheel: Path, members: dict[str, str], unlisted: bool = False, listed: tuple[str, ...] = ()) -> Path:
        out = tmp_path / "repacked" / str(len(members)) / wheel.name
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            content = {n: archive.read(n) for n in archive.namelist() if not n.endswith("/")}
        info = next(n for n in content if n.endswith("/RECORD")).partition("/")[0]
        content |= {name.format(info=info): text.encode() for name, text in members.items()}
        shown = [n for n in content if not (unlisted and n in members) and n != f"{info}/RECORD"]
        digests = {
            n: base64.urlsafe_b64encode(hashlib.sha256(content[n]).digest()).rstrip(b"=").decode() for n in shown
        }
        lines = [f"{n},sha256={digests[n]},{len(content[n])}" for n in shown]
        lines += [f"{n},," for n in (*listed, f"{info}/RECORD")]
        content[f"{info}/RECORD"] = "\n".join([*lines, ""]).encode()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
        return out

    return add


@pytest.fixture(scope="session")
def hub_wheels(tmp_path_factory) -> list[Path]:
    """plumbob-hub, and plumbob-console, which it needs."""
    out = tmp_path_factory.mktemp("hub")
    return [build(source, out / source.name) for source in (HUB, HUB.parent / "console")]


@pytest.fixture(scope="session")
def template(tmp_path_factory, hub_wheels) -> Python:
    """A virtual environment into which uv installed plumbob-hub's wheel, with its modules compiled."""
    root = tmp_path_factory.mktemp("template") / "python"
    subprocess.run([uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(root)], check=True)
    install = ["pip", "install", "--quiet", "--python", str(root / "bin" / "python"), *map(str, hub_wheels)]
    subprocess.run([uv.find_uv_bin(), *install], check=True)
    python = Python(root)
    python.run(
        "python",
        "-c",
        "import plumbob.hub.install.install, plumbob.hub.cli.hub, plumbob.hub.publish.publish, dumb_pypi.main",
    )
    return python


@pytest.fixture(scope="session")
def cleaned() -> list[Python]:
    """Environments that tests are done with, as clean as new ones."""
    return []


@pytest.fixture
def new_python(tmp_path_factory, template, cleaned):
    """Make a virtual environment that has plumbob-hub and nothing else: a copy of the template's, in a tenth of the time."""
    lent = []

    def make(at: Path | None = None) -> Python:
        if at is None and cleaned:
            lent.append(cleaned.pop())
            return lent[-1]
        python = Python(at or tmp_path_factory.mktemp("python") / "python")
        subprocess.run([uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(python.root)], check=True)
        shutil.copytree(template.site, python.site, copy_function=os.link, dirs_exist_ok=True)
        os.link(template.root / "bin" / "uv", python.root / "bin" / "uv")
        for script in ("hub", "vf-install"):
            text = (template.root / "bin" / script).read_text().replace(str(template.root), str(python.root))
            (python.root / "bin" / script).write_text(text)
            (python.root / "bin" / script).chmod(0o755)
        lent.extend([python] if at is None else [])
        return python

    yield make
    for python in lent:
        python.uninstall(keep=template)
    cleaned.extend(lent)


@pytest.fixture
def hub(monkeypatch, capfd):
    """Run a `hub` command in this process: a second faster than a new one, for what touches no interpreter.

    `publish` runs without the conformance check, which has tests of its own: these toys have nothing to play.
    """
    from plumbob.console.app import run_app
    from plumbob.hub.cli import hub as cli
    from plumbob.hub.publish import publish

    def run(*arguments: str | Path, cwd: Path | None = None, code: int = 0, **environ: str):
        with monkeypatch.context() as patch:
            patch.setattr(publish, "default_gate", lambda *_: None)
            ours = ("UV_", "PIP_", "PLUMBOB_", "COLUMNS")
            for name in [n for n in os.environ if n.startswith(ours) and n != "UV_CACHE_DIR"]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            with pytest.raises(SystemExit) as end:
                run_app("hub", cli.app, [str(a) for a in arguments])
        said = capfd.readouterr()
        assert end.value.code == code, said
        assert PASSWORD not in said.out + said.err
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run


@pytest.fixture
def serve():
    """Serve a folder over HTTP, or what `answers` says instead; the index is at `url`."""
    servers = []

    def start(directory: Path, answers: type = http.server.SimpleHTTPRequestHandler) -> Server:
        asked = []

        class Handler(answers):
            def log_request(self, *_):
                asked.append(self.path)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return Server(f"http://127.0.0.1:{server.server_port}/simple/", asked)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def unchecked(monkeypatch):
    """Let an index be made of any wheels, as another program than `hub index` makes it."""
    monkeypatch.setattr("plumbob.hub.index.static_index.foreign", lambda wheel: [])


@pytest.fixture
def hub_index(tmp_path, make_wheel):
    """An index with vf-toy 0.1.0 and 0.2.0, which need plumbob-shared, and vf-other."""
    wheels = [
        make_wheel("vf-toy", "0.1.0", ("plumbob-shared>=0.1,<0.2",), "toy"),
        make_wheel("vf-toy", "0.2.0", ("plumbob-shared>=0.1,<0.2",), "toy"),
        make_wheel("vf-other", "1.0", (), "other"),
        make_wheel("plumbob-shared", "0.1.0"),
    ]
    add_files(wheels, tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def evil_index(tmp_path, make_wheel, serve) -> Server:
    """What squatters would put on a public index: our names, and near misses, in version 99."""
    names = ["vf-toy", "vf-toyy", "vf-absent", "plumbob-shared", "plumbob-missing"]
    wheels = [
        make_wheel(n, "99.0", (), n.removeprefix("vf-") if n.startswith("vf-") else None, "EVIL = 1") for n in names
    ]
    add_files(wheels, tmp_path / "evil")
    return serve(tmp_path / "evil")


@pytest.fixture
def pypi_server(tmp_path):
    """pypiserver with a password on everything. Its address is the upload address; the index is below simple/."""
    from passlib.hash import sha256_crypt

    # Every request is checked anew; the usual number of rounds takes half a second.
    (tmp_path / "htpasswd").write_text(f"ci:{sha256_crypt.using(rounds=1000).hash(PASSWORD)}\n")
    packages = tmp_path / "pypiserver"
    packages.mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Without --disable-fallback it would answer for unknown names with the public index.
    flags = ["-a", "update,download,list", "--disable-fallback", "--hash-algo", "sha256"]
    command = [
        sys.executable,
        "-m",
        "pypiserver",
        "run",
        "-i",
        "127.0.0.1",
        "-p",
        str(port),
        "-P",
        tmp_path / "htpasswd",
    ]
    with (tmp_path / "pypiserver.log").open("w") as log:
        server = subprocess.Popen([*map(str, command), *flags, str(packages)], stdout=log, stderr=log)
    try:
        for _ in range(200):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Server(f"http://127.0.0.1:{port}/", [])
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def password() -> dict[str, str]:
    """The variables that hold the password, for reading and for publishing."""
    return {
        "UV_INDEX_PLUMBOB_USERNAME": "ci",
        "UV_INDEX_PLUMBOB_PASSWORD": PASSWORD,
        "UV_PUBLISH_USERNAME": "ci",
        "UV_PUBLISH_PASSWORD": PASSWORD,
    }


@pytest.fixture
def evil_links(tmp_path, make_wheel) -> Path:
    """A folder of wheels under our names and our own version numbers, with other bytes."""
    links = tmp_path / "links"
    links.mkdir()
    for name, version, environment in [("vf-toy", "0.1.0", "toy"), ("plumbob-shared", "0.1.0", None)]:
        shutil.copy(make_wheel(name, version, (), environment, "EVIL = 2"), links)
    (links / "o.txt").write_text("vf-toy==99.0\nplumbob-shared==99.0\n")
    return links
