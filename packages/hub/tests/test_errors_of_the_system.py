"""A full disk, a missing permission, a process that hangs or ends: one sentence, exit code 2, and nothing is lost."""

import http.server
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.hub.index.static_index import add_files
from plumbob.hub.publish.scaffold import create


def hub(*arguments: str | Path, limit: int | None = None, **environ: str) -> subprocess.CompletedProcess:
    """Run `hub` in a new process. `limit`: no file may grow beyond so many KB, as if the disk were full."""
    program = Path(sys.executable).parent / "hub"
    command = [str(program), *map(str, arguments)]
    if limit is not None:
        # Python ignores SIGXFSZ, so that writing fails with "File too large", as on a full disk with another name.
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "hub", *command]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=600)


def everything(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def one_sentence(done: subprocess.CompletedProcess, *told: str) -> None:
    said = (done.stderr + done.stdout).strip()
    assert done.returncode == 2, said
    *working, last = said.splitlines()  # what is done is said first
    assert "Traceback" not in said and len(working) < 2 and all(t in last for t in told), said


@pytest.fixture
def big_wheel(make_wheel, repack) -> Path:
    return repack(make_wheel("vf-other", "2.0", (), "other"), {"vf_other/data.txt": os.urandom(1_000_000).hex()})


@pytest.mark.slow
def test_a_full_disk_leaves_the_index_as_it_was(make_wheel, make_project, big_wheel, tmp_path):
    index = tmp_path / "hub"
    add_files([make_wheel("vf-other", "1.0", (), "other")], index)
    before = everything(index)
    one_sentence(
        hub("index", big_wheel, "--output", index, limit=100),
        f"hub: the index {index} could not be changed and is as it was: File too large",
    )
    assert everything(index) == before
    assert not [p for p in tmp_path.iterdir() if "building" in p.name]
    library = make_project(tmp_path / "library", "plumbob-large")
    (library / "src" / "plumbob_large" / "data.txt").write_text(os.urandom(1_000_000).hex())
    done = hub("publish", library, "--index", index, limit=100)
    one_sentence(done, "is not published, because its build failed")
    assert everything(index) == before
    assert hub("index", big_wheel, "--output", index).returncode == 0


@pytest.fixture
def read_only(tmp_path, make_wheel):
    """An index in a folder that nobody may write, not even root: a file of that name is where the lock would be."""
    index = tmp_path / "shared" / "hub"
    add_files([make_wheel("vf-other", "1.0", (), "other")], index)
    (index.parent / ".hub.lock").unlink(missing_ok=True)
    (index.parent / ".hub.lock").mkdir()
    return index


def test_an_index_that_may_not_be_written_is_one_sentence(read_only, make_wheel):
    before = everything(read_only)
    for command in (
        ["index", make_wheel("vf-other", "1.1", (), "other"), "-o"],
        ["yank", "other==1.0", "--reason", "x", "--index"],
    ):
        one_sentence(
            hub(*command, read_only), f"the index {read_only} could not be changed and is as it was: ", ".hub.lock"
        )
    assert everything(read_only) == before


@pytest.mark.slow
def test_without_permission(tmp_path, make_wheel, make_project):
    add_files([make_wheel("vf-other", "1.0", (), "other")], tmp_path / "shared" / "hub")
    index, library = tmp_path / "shared" / "hub", make_project(tmp_path / "library", "plumbob-large")
    (tmp_path / "shared").chmod(0o500)
    program = [str(Path(sys.executable).parent / "hub")]
    if os.geteuid() == 0:  # root without the capabilities that let it write everywhere
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and there is no setpriv to take that away")
        less = "-dac_override,-dac_read_search"
        program = ["setpriv", "--bounding-set", less, "--inh-caps", less, *program]
    try:
        for command in (
            ["index", make_wheel("vf-other", "1.1", (), "other"), "-o", index],
            ["yank", "other==1.0", "--reason", "x", "--index", index],
            ["publish", library, "--index", index],
        ):
            done = subprocess.run([*program, *map(str, command)], capture_output=True, text=True)
            done.stderr = done.stderr.splitlines()[-1]  # before it, `publish` lists what it would upload
            one_sentence(done, "Permission denied", "; choose a place that you may read and write")
    finally:
        (tmp_path / "shared").chmod(0o700)


def test_a_damaged_catalog_is_named(make_wheel, tmp_path):
    add_files([make_wheel("vf-other", "1.0", (), "other")], tmp_path / "hub")
    for damage in ("{", "[]"):
        (tmp_path / "hub" / "catalog.json").write_text(damage)
        one_sentence(
            hub("yank", "other==1.0", "--reason", "x", "--index", tmp_path / "hub"), "catalog.json is damaged ("
        )


@pytest.mark.parametrize("command", [["check"], ["publish", "--index", "hub"], ["new", "--output"], ["index", "-o"]])
def test_a_file_where_a_folder_is_expected(command, tmp_path):
    (tmp_path / "file").write_text("text")
    argument = tmp_path / "file" / "below"
    done = hub(
        *(["new", "thing", "--output"] if command[0] == "new" else command),
        argument,
        *([argument] if command[0] == "index" else []),
    )
    one_sentence(done)


def test_full_temporary_folders_are_one_sentence(tmp_path):
    project = create("broken", tmp_path)
    for command in (["check", project], ["publish", project, "--index", tmp_path / "hub"]):
        done = hub(*command, TMPDIR=str(tmp_path / "none"), TEMP="", TMP="", limit=0)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_an_environment_that_writes_into_inherited_descriptors_fails_the_check(tmp_path):
    project = create("broken", tmp_path)
    module = project / "src" / "vf_broken" / "__init__.py"
    for harm in ('os.write(fd, b"not yours\\n")', "os.write(fd, b'{\"begin\": []}\\n')", "os.close(fd)"):
        original = module.read_text()
        loop = (
            f"import contextlib, os\nfor fd in range(3, 20):\n    with contextlib.suppress(OSError):\n        {harm}\n"
        )
        module.write_text(
            original.replace('"""\n', f'"""\n{loop}', 1) if original.startswith('"""') else loop + original
        )
        done = hub("check", project)
        module.write_text(original)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr and "FAIL  import " in done.stdout
        assert "file descriptors that it has not opened" in done.stdout or "the process ended with" in done.stdout


@pytest.mark.slow
def test_one_that_hangs_or_exits_at_import_is_listed_as_broken(new_python, make_wheel):
    python = new_python()
    hangs = "import time; time.sleep(3600)"
    bodies = {
        "leaves": "import os; os._exit(0)",
        "forks": "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])",
        "quits": "raise SystemExit(0)",
    }
    for name, body in bodies.items():
        wheel = make_wheel(f"vf-{name}", "0.1.0", (), name, body)
        python.run("uv", "pip", "install", "--python", python.root / "bin" / "python", wheel)
    done = python.run("hub", "list", "--check", "--json")
    reasons = {row["name"]: row["reason"] for row in json.loads(done.stdout)}
    assert reasons == {
        "forks": "",
        "leaves": "importing it ended the process with exit code 0",
        "quits": "importing it ended the process with exit code 0",
    }
    refused = python.run("vf-install", make_wheel("vf-other", "1.0", (), "other", hangs), "--timeout", "1", code=1)
    assert "installed, but other does not load: importing it takes more than 1 s" in refused.stdout
    listed = python.run("hub", "list", "--check", "--timeout", "0.2", "--json")
    assert "importing it takes more than 0.2 s" in listed.stdout


@pytest.fixture
def endless(serve, tmp_path):
    """A public index: no page for a name, and a list of names that never ends. Returns its URL and the bytes it sent."""
    sent = []

    class Endless(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/simple/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            line = b'<a href="vf-some-name/">vf-some-name</a>\n' * 1000
            try:
                while sum(sent) < 400_000_000:
                    self.wfile.write(line)
                    sent.append(len(line))
            except OSError:
                pass

    return serve(tmp_path, Endless).url, sent


def test_an_unknown_name_does_not_download_a_public_index_s_list_of_names(endless, tmp_path):
    from plumbob.hub.install.install import Options, install

    url, sent = endless
    (outcome,) = install(["vf-gsm9k"], Options(index=url), tmp_path)
    assert outcome.detail == f"'vf-gsm9k' is not on {url}; see `hub search`" and outcome.user_error
    one_sentence(hub("search", "gsm", "--index", url), "has no catalog, and its list of names is too long to search")
    assert sum(sent) < 30_000_000  # two times a megabyte, and what the sockets' buffers took


@pytest.mark.parametrize(("line", "said"), [
    ("mkdir gone; cd gone; rmdir ../gone; hub list --check", "hub: the current folder has been deleted; change to another one"),
    ("hub info lookup > /dev/full", "hub: No space left on device; free some space"),
    ("report --help > /dev/full", "report: No space left on device; free some space"),
])  # fmt: skip
def test_a_shell_that_gives_no_place_is_one_sentence(line, said, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error(new_python):
    done = subprocess.run(
        ["bash", "-c", f"{Path(sys.executable).parent / 'hub'} list --json | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and shutil.which("bash")
