"""An installation that does not finish leaves what was there before: after a full disk, a signal or a kill."""

import json
import os
import signal
import subprocess
import sys

import pytest
from plumbob.hub.index.static_index import add_files


@pytest.fixture
def growing_index(tmp_path, make_wheel, repack):
    """An index with vf-toy 0.1.0 and 0.2.0; the second has a file of 4 MB."""
    old = make_wheel("vf-toy", "0.1.0", (), "toy", "VERSION = 1")
    new = make_wheel("vf-toy", "0.2.0", (), "toy", "VERSION = 2")
    big = repack(new, {"vf_toy/zz_data.txt": os.urandom(2_000_000).hex()})
    add_files([old, big], tmp_path / "hub")
    return tmp_path / "hub"


def works(python, version: str, number: int) -> bool:
    (row,) = json.loads(python.run("hub", "list", "--check", "--json").stdout)
    loaded = python.run("python", "-c", "import vf_toy; print(vf_toy.VERSION)").stdout
    return (row["version"], row["status"], loaded) == (version, "ok", f"{number}\n")


@pytest.mark.slow
def test_a_file_that_cannot_be_written_leaves_the_old_version(new_python, growing_index):
    """A limit on the size of files stands in for a full disk: uv has removed the old version when it meets it."""
    python, other = new_python(), new_python()
    python.run("vf-install", "toy==0.1.0", "--index", growing_index)
    other.run("vf-install", "toy", "--index", growing_index)  # so that uv's cache has 0.2.0
    command = ["vf-install", "toy", "--upgrade", "--index", str(growing_index)]
    limited = f"ulimit -f 1000; exec {python.root}/bin/{' '.join(command)}"
    environ = python.environ()
    done = subprocess.run(
        ["bash", "-c", limited], capture_output=True, text=True, env={**environ, "UV_LINK_MODE": "copy"}
    )
    assert done.returncode in (1, 2) and "failed         toy: " in done.stdout, done.stdout + done.stderr
    assert (
        "uv was ended by the signal SIGXFSZ; vf-toy 0.1.0 was put back" in done.stdout
        and "Traceback" not in done.stderr
    )
    assert works(python, "0.1.0", 1) and not list(python.site.glob("vf_toy-0.2.0*"))
    assert not (python.site / "vf_toy" / "zz_data.txt").exists() and not (python.site / ".vf-install-undo").exists()
    fresh = new_python()
    failing = ["bash", "-c", limited.replace(str(python.root), str(fresh.root))]
    done = subprocess.run(failing, capture_output=True, text=True, env={**environ, "UV_LINK_MODE": "copy"})
    assert "failed         toy: uv was ended by the signal SIGXFSZ" in done.stdout
    assert not list(fresh.site.glob("vf_toy*")) and fresh.run("hub", "list", "--json").stdout == "[]\n"
    assert "vf-toy 0.2.0" in python.run("vf-install", "toy", "--upgrade", "--index", growing_index).stdout
    assert works(python, "0.2.0", 2)


KILLED = """
import os, signal, sys, sysconfig
from pathlib import Path
from plumbob.hub.install import undo
from plumbob.hub.index.wheels import read_wheel

with undo.one_installation():
    undo.keep(["vf-toy"], [read_wheel(Path(sys.argv[1]))])
    site = Path(sysconfig.get_path("purelib"))
    for file in [*site.glob("vf_toy-0.1.0.dist-info/*")][:int(sys.argv[2])]:
        file.unlink()
    (site / "vf_toy" / "__init__.py").unlink()
    (site / "vf_toy" / "zz_data.txt").write_text("half of")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("removed", [0, 2, 99], ids=["nothing", "some", "all"])
def test_a_kill_is_told_and_undone_by_the_next_installation(removed, new_python, growing_index):
    """`removed`: how many files of the old version's metadata were gone when the process was killed."""
    python = new_python()
    python.run("vf-install", "toy==0.1.0", "--index", growing_index)
    wheel = growing_index / "files" / "vf_toy-0.2.0-py3-none-any.whl"
    killed = python.run("python", "-c", KILLED, wheel, removed, code=None)
    assert killed.returncode == -signal.SIGKILL
    rows = json.loads(python.run("hub", "list", "--json").stdout)
    assert (
        rows
        and not any("at this moment" in row["reason"] for row in rows)
        and all(row["status"] == "broken" for row in rows)
    )
    told = " ".join(row["reason"] for row in rows)
    assert "are missing, such as vf_toy/__init__.py" in told or "the next `vf-install` puts 0.1.0" in told
    done = python.run("vf-install", "./nowhere", code=2)
    assert "put back after an installation that was cut off: vf-toy 0.1.0" in done.stderr
    assert works(python, "0.1.0", 1) and not (python.site / "vf_toy" / "zz_data.txt").exists()


@pytest.mark.slow
def test_a_signal_to_end_is_obeyed_and_undoes(new_python, growing_index, tmp_path):
    """uv is stood in for by a program that removes the old version, as uv does first, and then takes its time."""
    python = new_python()
    python.run("vf-install", "toy==0.1.0", "--index", growing_index)
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"#!{sys.executable}\nimport shutil, sys, time, pathlib\n"
        'if "--dry-run" in sys.argv:\n'
        '    print(\'{"changes": [{"name": "vf-toy", "version": "0.1.0", "action": "uninstalled"}]}\')\n'
        "else:\n"
        f"    shutil.rmtree({str(python.site / 'vf_toy')!r})\n"
        '    print("removed", flush=True)\n    time.sleep(600)\n'
    )
    slow.chmod(0o755)
    code = (
        "import sys; from plumbob.hub.install import install; install.find_uv = lambda: sys.argv.pop(1)\n"
        "from plumbob.hub.cli.main import vf_install; vf_install()"
    )
    command = [python.root / "bin" / "python", "-c", code, slow, "toy", "--upgrade", "--index", growing_index]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("removed" in line for line in process.stderr)
    (row,) = json.loads(python.run("hub", "list", "--json").stdout)
    assert row["status"] == "broken"
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 128 + signal.SIGTERM
    process.communicate()
    assert works(python, "0.1.0", 1)


@pytest.mark.slow
def test_without_room_for_what_is_kept_nothing_is_changed(new_python, growing_index):
    python = new_python()
    python.run("vf-install", "toy==0.1.0", "--index", growing_index)
    (python.site / ".vf-install-undo").write_text("a file is in the way, as a disk without a free inode would be")
    done = python.run("vf-install", "toy", "--upgrade", "--index", growing_index, code=2)
    assert "nothing was installed or changed" in done.stdout + done.stderr
    assert works(python, "0.1.0", 1)


@pytest.mark.slow
def test_while_an_installation_runs_it_is_not_called_cut_off(new_python, growing_index):
    python = new_python()
    python.run("vf-install", "toy==0.1.0", "--index", growing_index)
    code = (
        "import subprocess, sys\nfrom plumbob.hub.install import undo\nwith undo.one_installation():\n"
        "    undo.keep(['vf-toy'], [])\n    import shutil, sysconfig, pathlib\n"
        "    site = pathlib.Path(sysconfig.get_path('purelib'))\n"
        "    [shutil.rmtree(p) for p in site.glob('vf_toy*')]\n"
        "    print(subprocess.run([sys.argv[1], 'list', '--json'], capture_output=True, text=True).stdout)\n"
        "    undo.put_back(undo.undo_folder())\n"
    )
    (row,) = json.loads(python.run("python", "-c", code, python.root / "bin" / "hub").stdout)
    assert (row["distribution"], row["reason"]) == ("vf-toy", "it is being installed at this moment")
    assert works(python, "0.1.0", 1)
