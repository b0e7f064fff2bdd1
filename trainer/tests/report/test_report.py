"""`report` without a browser: the command, what it reads, and what `train` stores and writes for it."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.testing.faulty.catalogue import FAULTS
from plumbob.testing.handmade_runs import GROUP, make_run, stored, tiny_tokenizer
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.cli import report as cli
from plumbob.trainer.config.bundled_models import bundled_folder
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.report.live import serve
from plumbob.trainer.report.rollouts import collect
from plumbob.trainer.report.vocabulary import token_texts
from plumbob.trainer.report.write import page, read
from plumbob.trainer.run_files.token_record import expand, run_lengths
from plumbob.trainer.training import finish
from plumbob.trainer.training.train import run


@pytest.fixture
def report(ended):
    return partial(ended, "report", cli.app)


def test_one_file_beside_the_run(report, tmp_path):
    directory = make_run(tmp_path, "r")
    code, out, err = report(directory)
    told = [f"examining {directory}", f"reading the rollouts of {directory}", f"writing {directory / 'report.html'}"]
    assert err == "".join(f"  {line}\n" for line in told)
    assert code == 0 and out.startswith(f"{directory / 'report.html'}  ") and "1 run, 4 steps, 32 rollouts" in out
    text = (directory / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text) and "@import" not in text


def test_mistakes(report, tmp_path):
    directory = make_run(tmp_path, "r")
    assert report(tmp_path / "nowhere")[::2] == (
        2,
        f"report: there is no folder {tmp_path}/nowhere\n",
    )
    assert "metrics.jsonl is a file; name the run directory" in report(directory / "metrics.jsonl")[2]
    assert "is a folder; name a file" in report(directory, "-o", tmp_path)[2]
    assert "there is no folder" in report(directory, "-o", tmp_path / "no" / "folder.html")[2]
    assert "--live serves the page and writes no file" in report(directory, "--live", "-o", tmp_path / "x.html")[2]
    (directory / "config.toml").write_text("model = ")
    assert "the settings of" in report(directory)[2]


def test_a_folder_of_runs_is_one_page_of_all_that_can_be_read(report, tmp_path):
    for name in ("a", "b", "broken"):
        make_run(tmp_path, name)
    (tmp_path / "broken" / "config.toml").write_text("model = ")
    (tmp_path / "notes").mkdir()
    code, out, err = report(tmp_path)
    assert code == 0 and out.startswith(f"{tmp_path / 'report.html'}  ") and "2 runs, 8 steps, 64 rollouts" in out
    assert f"the settings of {tmp_path / 'broken'} cannot be read" in err
    assert report(tmp_path, tmp_path / "a", "-o", tmp_path / "again.html")[1].count("2 runs") == 1  # none twice
    assert "is not a run directory: neither it nor a folder in it has a config.toml" in report(tmp_path / "notes")[2]
    assert "cannot be read" in report(tmp_path / "broken")[2]


def test_damaged_files_are_told_and_the_rest_is_shown(report, tmp_path):
    directory = make_run(tmp_path, "r")
    third = directory / "traces" / "step_3.jsonl.gz"
    third.write_bytes(third.read_bytes()[:-20])
    second = directory / "traces" / "step_2.jsonl.gz"
    lines = gzip.decompress(second.read_bytes()).decode().splitlines()
    second.write_bytes(gzip.compress("\n".join(["{}", "nonsense", *lines[2:]]).encode()))
    (directory / "summary.json").write_text("{")
    code, out, err = report(directory)
    assert code == 0 and f"{3 * 2 * GROUP - 2} rollouts" in out
    metrics = (directory / "metrics.jsonl").read_text().splitlines()
    (directory / "metrics.jsonl").write_text("\n".join([metrics[0], "{no", *metrics[2:], "{half"]))
    lost = f"line 2 is damaged, so it and the {len(metrics) - 1} after it are not read"
    told = report(directory)
    # A page of what can be read is worth having, so this is no failure; the page itself says what is not on it.
    assert told[0] == 0 and lost in told[2] and any(lost in note for note in read([directory]).notes)
    (directory / "metrics.jsonl").write_text("\n".join([*metrics, "{half"]))  # what a kill leaves
    assert "is damaged" not in report(directory)[2]
    assert "step_3.jsonl.gz cannot be read" in err and "line 2 of step 2 is no trace" in err


@pytest.mark.slow
def test_a_limit_in_bytes_keeps_whole_steps_the_ends_and_what_findings_name(report, tmp_path):
    directory = make_run(tmp_path, "r", steps=40)
    whole = collect([directory])
    assert whole.steps_left_out == 0 and len(whole.chunks) == 40
    sizes = [len(chunk) for chunk in whole.chunks]
    found = collect([directory], sum(sizes) // 4, [{17}])
    steps = sorted(set(found.index["step"]))
    assert {1, 17, 40} <= set(steps) and found.steps_left_out == 40 - len(steps)
    size = sum(map(len, found.chunks))
    assert sum(sizes) // 4 <= size < sum(sizes) // 4 + max(sizes)  # a step is whole, and one may stand over
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) <= 8  # 40 steps in four times as few: spread over the run
    assert all(found.index["step"].count(step) == 2 * GROUP for step in steps)
    assert len(set(collect([directory], 1).index["step"])) == 1
    assert "leaves out" not in report(directory, "--megabytes", "0")[2]
    assert "leaves out the rollouts of" in report(directory, "--megabytes", "0.01")[2]


def test_a_run_without_steps_traces_or_tokenizer(report, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.toml").write_text(TrainConfig(model="someone/unheard-of").to_toml())
    assert report(begun)[0] == 0
    directory = make_run(tmp_path, "r")
    (directory / "config.toml").write_text(TrainConfig(model="someone/unheard-of").to_toml())
    code, _, err = report(directory)
    assert code == 0 and "The tokenizer of r was not found" in err and "shown as ids" in err


@given(st.lists(st.booleans()))
def test_run_lengths_hold_the_mask(values):
    assert expand(run_lengths(values)) == values


@given(st.text())
def test_texts_of_tokens_join_to_the_text(text):
    folder = bundled_folder("tiny")
    assert folder is not None
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    texts = token_texts(folder / "tokenizer.json", ids)
    joined = b"".join(bytes(t) if isinstance(t, list) else t.encode() for t in (texts[i] for i in ids))
    assert joined.decode() == tiny_tokenizer().decode(ids, skip_special_tokens=False)


def test_only_this_machine_is_served(tmp_path):
    directory = make_run(tmp_path, "r")
    server = serve([tmp_path], 0, None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    def ask(path: str, **headers: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    try:
        assert ask("/")[0] == 200 and "connect-src 'self'" in ask("/")[1]
        before = ask("/state")[1]
        assert ask("/state")[1] == before
        with (directory / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5}\n')
        assert ask("/state")[1] != before
        assert "2 runs" not in ask("/")[1] and "r, s - plumbob report" not in ask("/")[1]
        make_run(tmp_path, "s")  # a run that begins in the folder later
        assert "r, s - plumbob report" in ask("/")[1]
        assert ask("/../config.toml")[0] == 404
        # A page of another site that points its own name at this address gets nothing.
        assert ask("/", Host="evil.example")[0] == 403
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_asks_the_network_nothing(tmp_path):
    text = page(read([make_run(tmp_path, "r")]))
    assert "default-src 'none'" in text and "connect-src 'none'" in text
    assert text.count("<script") == text.count("</script>") == 1 + 4 + 1  # the overview, a chunk per step, the code


# What `train` stores and writes


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"kl_beta": 0.1}, {"num_iterations": 2, "num_minibatches": 2, "scale_rewards": "group"}]
)
def test_stored_rollouts_hold_what_training_computed(tmp_path, settings):
    assert run(quick_config(tmp_path, max_steps=2, **settings)) == 0
    directory = tmp_path / "r"
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows, start=1):
        traces = stored(directory, number)
        told = [trace["info"]["training"] for trace in traces]
        rewards = [sum(r["score"] * r["weight"] for r in trace["rewards"].values()) for trace in traces]
        for i, training in enumerate(told):
            group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
            assert (
                math.copysign(1, training["advantage"]) == math.copysign(1, rewards[i] - sum(group) / 4)
                or len(set(group)) == 1
            )
            assert training["trained"] == (training["advantage"] != 0 or "kl_beta" in settings)
        assert max(abs(training["advantage"]) for training in told) == pytest.approx(row["advantage/largest"], abs=1e-4)
        assert sum(training["trained"] for training in told) == row["train/rows"] > 0
        for trace, training in zip(traces, told, strict=True):
            for node in (node for node in trace["nodes"] if node["sampled"]):
                assert node["advantages"] == [training["advantage"]] * sum(node["mask"])
                if training["trained"]:
                    assert node["trainer_logprobs"] == pytest.approx(node["logprobs"], abs=2.1e-4)
                    assert len(node["entropies"]) == sum(node["mask"]) and min(node["entropies"]) >= 0
                assert (node.get("reference_logprobs") is not None) == ("kl_beta" in settings)
                if number == 1 and "kl_beta" in settings:
                    assert node["reference_logprobs"] == node["trainer_logprobs"]
        # Rows that were scored again after the step: their change is the policy's measured one.
        again = [trace for trace in traces if "logprobs_after" in trace["info"]["training"]]
        after = [value for trace in again for value in trace["info"]["training"]["logprobs_after"]]
        before = [value for trace in again for node in trace["nodes"] for value in node["logprobs"]]
        k3 = sum(math.expm1(a - b) - (a - b) for a, b in zip(after, before, strict=True)) / len(after)
        assert k3 == pytest.approx(row["policy/step_kl"], rel=0.05, abs=2e-8)


@pytest.mark.slow
def test_the_loss_mask_of_a_row_is_stored_where_it_is_not_what_was_sampled(tmp_path):
    assert run(quick_config(tmp_path, "healthy", max_steps=1)) == 0
    assert not any("loss_mask" in trace["info"]["training"] for trace in stored(tmp_path / "healthy", 1))
    assert set(collect([tmp_path / "healthy"]).index["odd"]) == {-1}
    with FAULTS["loss on all that follows the first prompt"].injected("lookup"):
        assert run(quick_config(tmp_path, "faulty", max_steps=1)) == 0
    found, with_results = collect([tmp_path / "faulty"]).index["odd"], 0
    for trace, odd in zip(stored(tmp_path / "faulty", 1), found, strict=True):
        mask = [value for node in trace["nodes"] for value in node["mask"]]
        loss = [i >= mask.index(True) for i in range(len(mask))]
        assert expand(trace["info"]["training"].get("loss_mask", run_lengths(mask))) == loss
        assert odd == next((i for i, used in enumerate(mask) if used != loss[i]), -1)
        if trace["info"]["training"][
            "trained"
        ]:  # the numbers belong to the sampled tokens, whatever else is in the loss
            for node in (node for node in trace["nodes"] if node["sampled"]):
                assert node["trainer_logprobs"] == pytest.approx(node["logprobs"], abs=2.1e-4)
        with_results += odd >= 0
    assert with_results


@pytest.mark.slow
@pytest.mark.long
def test_a_run_writes_its_report(tmp_path, capsys, monkeypatch):
    assert run(quick_config(tmp_path, max_steps=2)) == 0
    assert f"report           {tmp_path}/r/report.html" in capsys.readouterr().out
    assert (tmp_path / "r" / "report.html").stat().st_size > 10_000

    def broken(directory: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(finish, "write_at_end", broken)
    assert run(quick_config(tmp_path, "full", max_steps=2)) == 0
    assert "The report could not be written (OSError: no space left). Try:  report" in capsys.readouterr().err
