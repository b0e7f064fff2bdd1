"""The wheels of the workspace, as an index shows them: metadata, license, types, and a README whose links work."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import uv
from plumbob.hub.index.contents import foreign
from plumbob.hub.index.wheels import read_wheel, readme

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = sorted(
    file.parent
    for pattern in ("packages/*/pyproject.toml", "environments/*/pyproject.toml", "trainer/pyproject.toml")
    for file in ROOT.glob(pattern)
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Every wheel of the workspace, by the name of its distribution."""
    out = tmp_path_factory.mktemp("wheels")
    for member in MEMBERS:
        command = [uv.find_uv_bin(), "build", "--quiet", "--wheel", "--no-sources", "--out-dir", out, member]
        subprocess.run(command, check=True)
    return {read_wheel(file).name: file for file in out.glob("*.whl")}


@pytest.mark.slow
def test_twine_finds_nothing_wrong(wheels):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, wheels.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == len(MEMBERS) >= 10


@pytest.mark.slow
def test_each_wheel_says_who_made_it_what_it_is_and_may_be_done_with_it(wheels):
    license_text = (ROOT / "LICENSE").read_bytes()
    for name, file in wheels.items():
        wheel = read_wheel(file)
        fields = wheel.fields
        assert fields["Author"] and fields["Summary"] and fields["License-Expression"] == "Apache-2.0", name
        assert "Typing :: Typed" in fields.get_all("Classifier", []), name
        assert any(c.startswith("Programming Language :: Python :: 3.13") for c in fields.get_all("Classifier", []))
        assert foreign(wheel) == [], name
        with zipfile.ZipFile(file) as archive:
            (text,) = [n for n in wheel.members if n.endswith(".dist-info/licenses/LICENSE")]
            assert archive.read(text) == license_text, name
            assert sum(n.endswith("/py.typed") for n in wheel.members) == 1, name
        assert relative_links(readme(fields)) == [], name


def relative_links(text: str) -> list[str]:
    """Links that lead nowhere on the page of an index, which has the README alone."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("https://", "#"))]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_no_readme_of_a_distribution_links_into_the_repository(member):
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    assert relative_links((member / project["readme"]).read_text()) == []
    assert relative_links("[a](../a.md) [b](#b) [c](https://example.org)") == ["../a.md"]
