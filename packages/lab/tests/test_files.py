"""The files of a lab: what people wrote survives byte for byte; what is wrong is said in one sentence."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.lab.files import sections
from plumbob.lab.files.hypothesis import Hypothesis, read_hypothesis
from plumbob.lab.files.layout import add_hypothesis, lay_out
from plumbob.lab.files.tables import update_tables
from plumbob.lab.files.workspace import Lab, find_lab, slug
from plumbob.lab.runs.plan import flags_of, plan, unnamed_changes

PROSE = st.binary(max_size=200)


@pytest.fixture
def lab(tmp_path) -> Lab:
    lay_out(tmp_path / "lab", "lookup", "tiny", "--max-steps 4")
    return Lab(tmp_path / "lab")


@given(PROSE, PROSE, st.binary(max_size=50), st.text(max_size=50))
def test_prose_around_the_markers_survives_byte_for_byte(tmp_path_factory, before, after, inside, content):
    start, end = (marker.encode() for marker in sections.markers("results"))
    assume(b"lab:results" not in before + inside)
    path = tmp_path_factory.mktemp("prose") / "h.md"
    path.write_bytes(before + start + inside + end + after)
    assume("lab:results" not in content)
    sections.write(path, sections.with_section(sections.read(path), "results", content))
    written = path.read_bytes()
    assert written.startswith(before + start) and written.endswith(end + after)
    assert sections.section(sections.read(path), "results") == content.strip()


@given(PROSE, st.sampled_from(["\n", "\r\n"]), st.sampled_from(["pending", '"pending"', "testing # by hand", ""]))
def test_a_field_of_the_front_matter_changes_alone(tmp_path_factory, prose, newline, written):
    path = tmp_path_factory.mktemp("front") / "h.md"
    lines = ["---", "id: H01", "title: 'status: pending'", f"status: {written}", "other: 1 # status: x", "---", ""]
    path.write_bytes(newline.join(lines).encode() + prose)
    sections.write(path, sections.with_field(sections.read(path), "status", "validated"))
    comment = " # by hand" if "#" in written else ""
    expected = [line if not line.startswith("status") else f"status: validated{comment}" for line in lines]
    assert path.read_bytes() == newline.join(expected).encode() + prose


def test_a_section_is_added_at_the_end_and_must_have_its_own_end():
    added = sections.with_section("mine\n", "results", "theirs")
    assert added.startswith("mine\n") and sections.section(added, "results") == "theirs"
    with pytest.raises(UserError, match="has no end"):
        sections.with_section("<!-- lab:results -->\n", "results", "x")


def test_init_lays_out_eight_hypotheses_with_readable_criteria(lab):
    assert [e.hypothesis.id for e in lab.entries] == [f"H{i:02d}" for i in range(1, 9)]
    for entry in lab.entries:
        h = entry.hypothesis
        assert all(h.criteria()) and h.causes and h.changes and h.minutes
        assert "@" not in sections.read(entry.path)
        differing = {t.split(": ")[0].split()[-1] for t in unnamed_changes(h, plan(h, lab.folder(h), [0]))}
        assert not differing, h.id
    assert {e.hypothesis.order for e in lab.entries} == set(range(1, 9))


def test_init_takes_over_environment_model_and_flags_that_need_quotes(tmp_path):
    lay_out(tmp_path / "l", "musique", "Qwen/Qwen2.5-3B", '--dataset-name "my data" -a x="1: 2"')
    h = Lab(tmp_path / "l").entry("h01").hypothesis
    assert (h.env, h.model, h.flags) == ("musique", "Qwen/Qwen2.5-3B", '--dataset-name "my data" -a x="1: 2"')
    control = plan(h, tmp_path, [3])[0]
    assert control.start == ("train",)
    assert control.options[:5] == ("musique", "--model", "Qwen/Qwen2.5-3B", "--dataset-name", "my data")
    assert control.options[-4:] == ("--scale-rewards", "group", "--seed", "3")


def test_options_that_only_one_environment_knows_are_not_given_to_another(tmp_path):
    lay_out(tmp_path / "l", "musique", "tiny-musique", "--max-steps 4", "--datasets synthetic -a hops=2")
    single, lookup, multi = plan(Lab(tmp_path / "l").entry("h07").hypothesis, tmp_path, [0])
    assert "hops=2" not in single.options and single.options[5:] == (
        "--datasets",
        "synthetic",
        "--max-tokens",
        "160",
        "--seed",
        "0",
    )
    assert lookup.options == ("lookup", "--model", "tiny", "--max-steps", "4", "--seed", "0")
    assert multi.options[3:9] == ("--max-steps", "4", "--datasets", "synthetic", "-a", "hops=2")
    assert "hops=2" in Lab(tmp_path / "l").entry("h01").hypothesis.env_flags


def test_init_overwrites_nothing(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        lay_out(tmp_path, "lookup", "tiny", "")
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


def test_new_takes_the_next_number_and_the_labs_settings(lab):
    path = add_hypothesis(lab, 'a "quoted": title\nof two lines')
    h = read_hypothesis(path)
    assert (path.name, h.id) == ("h09-a-quoted-title-of-two-lines.md", "H09")
    assert h.title == 'a "quoted": title of two lines'
    assert h.flags == "--max-steps 4"
    assert "H09" in (lab.root / "README.md").read_text()
    assert slug("!!!") == "untitled"


def test_the_tables_follow_the_files_and_leave_what_people_wrote(lab):
    readme = lab.root / "README.md"
    readme.write_text(readme.read_text().replace("## Status", "## Status\n\nMy own words."))
    path = lab.entry("H03").path
    path.write_text(path.read_text().replace("priority: medium", "priority: low"))
    update_tables(lab)
    text = readme.read_text()
    assert "My own words." in text
    assert "[H03](hypotheses/h03-kl-divergence-bug.md) KL divergence bug | low | pending" in text


def test_a_status_that_was_typed_in_is_not_believed(lab):
    path = lab.entry("H03").path
    path.write_text(path.read_text().replace("status: pending", "status: validated"))
    entry = Lab(lab.root).entry("H03")
    assert entry.status == "pending"
    assert entry.notes == ["h03-kl-divergence-bug.md says validated, but the runs say pending"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("status: pending", "status: done"), "status: Input should be 'pending', 'testing'"),
        (("seeds: 3", "sedes: 3"), "sedes: there is no such field; did you mean seeds?"),
        (("flags: --scale-rewards none", "flgas: x"), "flgas: there is no such field; did you mean flags?"),
        (
            ("mean(reward/mean) of treatment", "mean(reward/mean) of placebo"),
            "the arms are: batch, control, treatment",
        ),
        (("id: H01", "id: [H01"), "is not YAML"),
        (("---\nid: H01", "id: H01"), "has no front matter"),
        (('flags: "--max-steps 4"', 'flags: "--x \'open"'), "are no options, as in a shell: No closing quotation"),
        (("  treatment:", "  lift:"), "no word of the criteria's language"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(lab, change, says):
    path = lab.entry("H01").path
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(UserError) as error:
        Lab(lab.root).entries  # noqa: B018 - reading is what fails
    assert says in str(error.value) and path.name in str(error.value) and "\n" not in str(error.value)


def test_two_files_of_one_id_are_refused(lab):
    (lab.root / "hypotheses" / "again.md").write_text(sections.read(lab.entry("H01").path))
    with pytest.raises(UserError, match="have the same id H01"):
        Lab(lab.root).entries  # noqa: B018


def test_the_lab_is_found_above_by_name_or_by_variable(lab, monkeypatch, tmp_path):
    monkeypatch.delenv("PLUMBOB_LAB", raising=False)
    monkeypatch.chdir(lab.root / "hypotheses")
    assert find_lab(None).root == Path("..")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no lab here"):
        find_lab(None)
    monkeypatch.setenv("PLUMBOB_LAB", "lab")
    assert find_lab(None).root == Path("lab")
    with pytest.raises(UserError, match="nowhere is no lab"):
        find_lab(Path("nowhere"))


def test_arms_that_differ_in_more_than_the_hypothesis_names_get_a_warning():
    arms = {
        "control": {"flags": "--scale-rewards group --lr 1e-3"},
        "treatment": {"flags": "--no-peft", "env": "gsm8k"},
    }
    h = Hypothesis(id="H01", title="t", changes=("scale_rewards", "peft"), arms=arms)
    told = unnamed_changes(h, [])
    assert told == [
        "the arms differ also in learning_rate: control 1e-3, treatment (not given)",
        "the arms differ also in env: control lookup, treatment gsm8k",
    ]


def test_flags_are_read_as_train_reads_them():
    assert flags_of(["--a", "1", "--b=2", "--no-peft", "--bf16", "--offset", "-1", "--max-steps", "5"]) == {
        "a": "1",
        "b": "2",
        "peft": "false",
        "bf16": "true",
        "offset": "-1",
        "max_steps": "5",
    }
