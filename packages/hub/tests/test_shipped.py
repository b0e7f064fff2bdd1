"""What a publish would make public: it is listed, and what looks private stops it before anything is uploaded."""

import re
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plumbob.hub.publish.secrets import secret_in
from plumbob.hub.publish.shipped import Shipped, listing, read_archive

ROOT = Path(__file__).parents[3]
LETTERS = string.ascii_letters + string.digits
# Put together here, so that no file of the repository holds what looks like a secret.
SECRETS = {
    "a private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA",
    "a token of Hugging Face": "hf_" + LETTERS[:34],
    "a key of OpenAI": "sk-proj-" + LETTERS[:20] + "T3Blbk" + "FJ" + LETTERS[:20],
    "a key of Anthropic": "sk-ant-api03-" + LETTERS[:40],
    "a key of OpenRouter": "sk-or-v1-" + "0af4" * 16,
    "a key of AWS": "AKIA" + "ABCDEFGHIJKLMNOP",
    "a token of GitHub": "ghp_" + LETTERS[:36],
    "a token of GitLab": "glpat-" + LETTERS[:20],
    "a key of Google": "AIza" + LETTERS[:35],
    "a token of Slack": "xoxb-" + "123456789012-" + LETTERS[:12],
    "a token of PyPI": "pypi-AgE" + LETTERS,
    "a token of npm": "npm_" + LETTERS[:36],
    "a key of Stripe": "sk_live_" + LETTERS[:24],
    "a JSON web token": "eyJ" + LETTERS[:12] + ".eyJ" + LETTERS[:12] + "." + LETTERS[:12],
    "a value like a password": 'WANDB_API_KEY = "' + "9f8e7d6c5b4a39281706" * 2 + '"',
}


@pytest.mark.parametrize(("what", "text"), SECRETS.items(), ids=SECRETS)
@given(before=st.text(max_size=40), after=st.text(max_size=40))
@example(before="", after="")
@settings(max_examples=25)
def test_a_secret_is_found_wherever_it_stands_and_is_never_repeated(what, text, before, after):
    found = secret_in("vf_x/notes.md", f"{before}\n{text}\n{after}".encode())
    line = before.count("\n") + 2
    assert found == f"{what} in line {line}"


PRIVATE = [".env", ".env.local", "prod.env", "id_rsa", "id_ed25519", "server.pem", "cert.key", ".netrc", ".pypirc",
           "credentials.json", "client_secret.json", "secrets.toml", "token.json", "my-token.txt", "api_keys.yaml",
           "service-account-prod.json", ".aws/config", ".git/config"]  # fmt: skip
SHARED = [".env.example", "id_rsa.pub", "environment.py", "secrets.py", "tokens.json", "tokenizer.json", "tokenizer_config.json",
          "special_tokens_map.json", "keys.py", "keyboard.md", "example.env", "py.typed", "data/train.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", [*PRIVATE, *SHARED])
def test_names_of_secrets(name):
    assert secret_in(f"vf_x/{name}", b"") == ("its name" if name in PRIVATE else None)


@pytest.mark.parametrize(
    "text",
    ['password = os.environ["UV_PUBLISH_PASSWORD_OF_2026"]', "token: str | None = None",
     'secret = "What is the word of 7 letters?"',
     "sk-learn-has-a-long-name-in-some-places-which-is-not-a-key", "hf_transfer", "the sha256 is " + "0af4" * 16,
     "export UV_PUBLISH_PASSWORD=change-me", "AKIA is a prefix", "-----BEGIN CERTIFICATE-----",
     'TOKENS = "/inference/v1/generate"'],
)  # fmt: skip
def test_what_only_resembles_a_secret(text):
    assert secret_in("vf_x/a.py", text.encode()) is None


def test_no_alarm_for_what_this_repository_publishes():
    folders = ("packages/*/src", "environments/*", "trainer/src", "packages/*/README.md", "trainer/README.md")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", *folders], capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines()]
    assert len(files) > 200
    assert {str(f): found for f in files if (found := secret_in(str(f), f.read_bytes()))} == {}


def git(folder: Path, *command: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *command], check=True, capture_output=True)


def commit(folder: Path) -> None:
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")


def test_secrets_and_links_stop_it_and_are_included_one_by_one(hub, make_project, tmp_path):
    (tmp_path / "outside.txt").write_text("what only this machine may have\n")
    x = make_project(tmp_path / "x", "vf-x", environment="x")
    source = x / "src" / "vf_x"
    (source / ".env").write_text("A=1\n")
    (source / "notes.md").write_text(f"a note\n{SECRETS['a private key']}\n")
    (source / "data.txt").symlink_to("../../../outside.txt")
    told = {
        "src/vf_x/.env": "it looks like a secret by its name",
        "src/vf_x/data.txt": "it is a link out of the project",
        "src/vf_x/notes.md": "it holds a private key in line 2",
    }
    included: list[str] = []
    for path in told:
        said = hub("publish", x, "--index", tmp_path / "hub", *included, code=2).stderr
        (sentence,) = [line for line in said.splitlines() if line.startswith("hub: ")]
        named = dict(re.findall(r"(src/\S+) \((.*?)\)", sentence))
        assert named == {p: reason for p, reason in told.items() if f"--include={p}" not in included}
        assert f"add --include {path} if everybody may have that file" in sentence
        assert "b3BlbnNzaC1rZXktdjEA" not in said and not (tmp_path / "hub").exists()
        included.append(f"--include={path}")
    published = hub("publish", x, "--index", tmp_path / "hub", *included)
    assert "published vf-x 0.1.0" in published.stdout
    for name in ("  src/vf_x/.env  4 B", "  vf_x/.env  4 B", "vf_x-0.1.0.tar.gz", "  vf_x/data.txt  32 B"):
        assert name in published.stderr.splitlines()


def test_what_git_ignores_or_does_not_track_stops_it(hub, make_project, tmp_path):
    repository = tmp_path / "repository"
    x = make_project(repository / "x", "vf-x", environment="x")
    (repository / ".gitignore").write_text("*.log\n")
    (repository / "LICENSE").write_text("for everybody\n")
    (x / "src" / "vf_x" / "LICENSE").symlink_to("../../../LICENSE")
    publish = ("publish", x, "--index", tmp_path / "hub")
    commit(repository)
    for name in ("run.log", "draft.md"):  # the first is ignored
        (x / "src" / "vf_x" / name).write_text("private thoughts\n")
    said = hub(*publish, code=2).stderr
    assert "src/vf_x/draft.md (git does not track it), src/vf_x/run.log (git does not track it); remove" in said
    assert not (tmp_path / "hub").exists()
    hub(*publish, "--include", "draft.md", "--include", "vf_x/*.log", "--include", "src/vf_x/*.log")
    (x / "src" / "vf_x" / "run.log").unlink()
    commit(repository)
    hub(*publish[:2], "--index", tmp_path / "other")

    other = tmp_path / "other-repository"
    other.mkdir()
    (other / "mine.txt").write_text("another repository's\n")
    commit(other)
    (x / "src" / "vf_x" / "linked.txt").symlink_to("../../../../other-repository/mine.txt")
    commit(repository)
    said = hub(*publish, code=2).stderr
    assert "src/vf_x/linked.txt (it is a link out of the project); remove" in said


def test_a_project_that_git_does_not_know_yet_may_be_published_without_what_git_ignores(hub, make_project, tmp_path):
    """`hub new` in somebody's repository: a commit is not asked for, and what would not be committed is not published."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("*.log\n")
    x = make_project(tmp_path / "x", "vf-x", environment="x")
    (x / "src" / "vf_x" / "run.log").write_text("private thoughts\n")
    said = hub("publish", x, "--index", tmp_path / "hub", code=2).stderr
    assert "public: src/vf_x/run.log (git does not track it); remove" in said
    (x / "src" / "vf_x" / "run.log").unlink()
    hub("publish", x, "--index", tmp_path / "hub")


def test_a_repository_that_git_cannot_read_is_not_taken_for_none(hub, make_project, tmp_path):
    x = make_project(tmp_path / "x", "vf-x", environment="x")
    (x / ".git").write_text("gitdir: /nowhere\n")
    said = hub("publish", x, "--index", tmp_path / "hub", code=2).stderr
    assert "git cannot say which of its files it tracks: fatal: not a git repository" in said


def test_a_link_to_a_folder_is_named(hub, make_project, tmp_path):
    (tmp_path / "data").mkdir()
    x = make_project(tmp_path / "x", "vf-x", environment="x")
    (x / "src" / "vf_x" / "data").symlink_to("../../../data")
    said = hub("publish", x, "--index", tmp_path / "hub", code=2).stderr
    assert "src/vf_x/data: a link to a folder cannot be published; copy the folder" in said


def test_a_dry_run_lists_and_refuses_as_well(hub, make_project, tmp_path):
    x = make_project(tmp_path / "x", "vf-x", environment="x")
    assert "  vf_x/__init__.py  " in hub("publish", x, "--index", tmp_path / "hub", "--dry-run").stderr
    (x / "src" / "vf_x" / "id_rsa").write_text("")
    refused = hub("publish", x, "--index", tmp_path / "hub", "--dry-run", code=2)
    assert refused.stdout == "" and "src/vf_x/id_rsa (it looks like a secret by its name)" in refused.stderr


def test_wheels_that_were_built_elsewhere_are_looked_into_when_they_are_indexed(hub, make_wheel, repack, tmp_path):
    wheel = repack(make_wheel("vf-other", "1.0", (), "other"), {"vf_other/.env": "A=1"})
    command = ("index", wheel, "--output", tmp_path / "hub")
    assert "vf_other/.env (it looks like a secret by its name)" in hub(*command, code=2).stderr
    assert not (tmp_path / "hub").exists()
    assert "1 new" in hub(*command, "--include", ".env").stdout


def test_a_folder_of_many_files_is_one_line(make_wheel):
    many = [Shipped(f"vf_x/data/{i}.txt", b"12345") for i in range(300)]
    assert listing("x", [Shipped("README.md", b"#" * 1234), *many]).splitlines() == [
        "x",
        "  README.md  1.2 kB",
        "  vf_x/data/  300 files, 1.5 kB",
    ]
    wheel = make_wheel("vf-other", "1.0", (), "other")
    assert "vf_other/__init__.py" in [file.path for file in read_archive(wheel)]
