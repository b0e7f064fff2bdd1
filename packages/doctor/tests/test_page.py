"""The order of verdicts, and the text that a user reads."""

from __future__ import annotations

import json
import re

import pytest
from plumbob.doctor import page
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination, merged, of_outcomes
from plumbob.doctor.findings import STAGES, Finding
from plumbob.doctor.stages import Outcome

WIDTHS = (60, 80)


def passed(check: str, stage: str) -> Finding:
    return Finding(check, "pass", "", None, stage)  # ty: ignore[invalid-argument-type]


def failed(check: str, cause: str, evidence: str = "7 of 48 differ", **more) -> Finding:
    return Finding(check, "fail", evidence, cause, CAUSES[cause].stage, **more)


def healthy() -> Examination:
    x = Examination("lookup", "tiny")
    for stage in STAGES:
        x.add("records", passed(f"{stage} is right", stage), passed(f"{stage} is still right", stage))
    return x


def sick() -> Examination:
    x = healthy()
    x.add("trends", failed("the policy keeps what it has learned", "policy-breaks", "reward .5 -> .1", step=33))
    x.add("trends", failed("no step loses what was learned", "learning-rate-too-high", "step 9 changed 2 nats", step=9))
    x.add("records", failed("the engine serves the trained weights", "weights-not-synced", "1.2 nats apart", step=1))
    x.add("records", failed("the loss has the slopes of its formula", "loss-differs-from-settings", step=1))
    x.add(
        "environment",
        failed(
            "a wrong answer earns less than a right one",
            "reward-exploitable",
            "12 of 48 wrong answers earn 1",
            place="grading.py:12 Task.correct",
        ),
    )
    x.add("environment", Finding("each call has one result", "error", "ValueError: no such tool", None, "tools"))
    x.limits.append("48 training tasks were played without a model: a fault of fewer than 6% can be missed.")
    return x


def text(x: Examination, width: int = 80, everything: bool = False) -> str:
    return "\n".join(page.lines(x, width=width, everything=everything))


def test_a_healthy_run_has_one_line_for_each_area() -> None:
    told = text(healthy())
    assert len(told.splitlines()) <= len(STAGES) + 3
    assert told.count("2 checks passed") == len(STAGES)
    assert "No cause found: 30 checks passed." in told
    assert "Not examined" not in told


def test_the_answer_is_what_explains_the_others() -> None:
    x = sick()
    assert x.causes == [
        "reward-exploitable",
        "loss-differs-from-settings",
        "weights-not-synced",
        "learning-rate-too-high",
        "policy-breaks",
    ]
    assert x.code == 1 and x.names_reason


def test_what_failed_has_evidence_place_and_remedy() -> None:
    told = " ".join(text(sick()).split())
    assert "Cause: reward-exploitable" in told
    assert "12 of 48 wrong answers earn 1" in told
    assert "grading.py:12 Task.correct" in told
    assert CAUSES["reward-exploitable"].fix[:40] in told
    later = told[told.index("may be consequences of this cause") :]
    assert later.index("loss-differs-from-settings") < later.index("weights-not-synced") < later.index("policy-breaks")
    assert "fewer than 6% can be missed" in told


def test_commands_name_the_run_s_own_environment_and_model() -> None:
    x = Examination("gsm8k", "my/model")
    x.add("trends", failed("the model sometimes succeeds", "never-succeeds"))
    assert "sft gsm8k --model my/model" in " ".join(text(x).split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("everything", [False, True])
def test_no_word_is_broken_and_no_line_is_too_wide(width: int, everything: bool) -> None:
    x = sick()
    wide = set(text(x, 100, everything).split())
    narrow = text(x, width, everything)
    for one in narrow.splitlines():
        assert len(one) <= width or len(one.split()) <= 3, one  # a path that is longer than a line stands alone
    assert set(narrow.split()) == wide


@pytest.mark.parametrize("width", WIDTHS)
def test_every_cause_can_be_printed(width: int) -> None:
    for name in CAUSES:
        x = Examination()
        x.add("records", failed("what is expected", name))
        told = text(x, width)
        assert name in told and " ".join(CAUSES[name].sentence.split()) in " ".join(told.split())
        assert all(len(one) <= width or len(one.split()) <= 3 for one in told.splitlines())


def test_no_line_contradicts_its_verdict() -> None:
    """A failed check is said to be expected, never stated; an area with a failure never says that its checks passed."""
    x = sick()
    for one in text(x, 100, everything=True).splitlines():
        if "the loss has the slopes of its formula" in one:
            assert "not so" in one or "expected:" in one
        if one.startswith("FAIL"):
            assert "passed" not in one
    assert "No cause found" not in text(x)


def test_areas_of_which_nothing_is_known_are_named() -> None:
    x = Examination()
    x.add("environment", passed("answers are read", "grading"))
    x.add(
        "records",
        Finding(
            "the saved model is the trained one",
            "unsure",
            "it takes a run that is under way, whose weights are changed for a moment",
            None,
            "saved",
        ),
    )
    told = " ".join(text(x).split())
    assert (
        "- saved model not examined: it takes a run that is under way, whose weights are changed for a moment" in told
    )
    assert "weight sync: nothing of it was examined" in told


def test_single_checks_that_wait_are_counted_and_listed_on_request() -> None:
    x = healthy()
    for name in ("memory", "entropy"):
        x.add(
            "trends", Finding(f"{name} is fine", "unsure", "it takes 20 steps to tell, and there are 3", None, "trends")
        )
    assert "2 checks of the course of the run" in " ".join(text(x).split())
    assert "entropy is fine" not in text(x)
    assert "entropy is fine" in text(x, everything=True)


def test_a_symptom_is_called_one() -> None:
    x = healthy()
    x.add("trends", failed("rollouts end by themselves", "truncated-rollouts"))
    told = text(x)
    assert "No cause found, but a symptom: truncated-rollouts" in told
    assert not x.names_reason and x.code == 1


def test_checks_that_could_not_be_completed_make_code_2() -> None:
    x = healthy()
    x.add("environment", Finding("tasks can be played", "error", "KeyError: 'x'", None, "tasks"))
    assert x.code == 2
    assert "1 of 31 checks could not be completed" in text(x)
    assert healthy().code == 0


def test_json() -> None:
    report = json.loads(json.dumps(sick().as_json("doctor lookup")))
    assert report["cause"] == "reward-exploitable" and report["symptoms"] == ["policy-breaks"]
    assert next(iter(report["causes"])) == "reward-exploitable"
    assert report["findings"][-2]["place"] == "grading.py:12 Task.correct"
    assert {finding["stage"] for finding in report["findings"]} == set(STAGES)


def test_html_page() -> None:
    x = sick()
    x.add("environment", failed("a <b> is no tag", "reward-wrong"))
    made = page.render(x, "doctor lookup")
    assert "<script" not in made and "a &lt;b&gt; is no tag" in made
    assert not re.search(r"https?://[^\s<]*\.(js|css)", made)
    assert "No cause found: 30 checks passed." in page.render(healthy(), "doctor lookup")


def test_outcomes_become_findings() -> None:
    bad = Outcome(
        "loss", "the loss has the slopes of its formula", "fail", 0.5, 0.1, "0.5 apart", "kl-term-wrong", "k1"
    )
    open_ = Outcome(
        "saved",
        "the saved model is the trained one",
        "not examined",
        evidence="it takes a run that is under way, whose weights are changed for a moment",
    )
    found = of_outcomes([bad, open_], 2)
    assert found[0].step == 2 and "fit k1" in found[0].evidence
    assert (found[1].verdict, found[1].cause) == ("unsure", None)


def test_checks_of_several_steps_are_merged() -> None:
    first, second = passed("rows are right", "rows"), failed("rows are right", "loss-mask-wrong")
    assert merged([first, second]) == [second]
    assert merged([Finding("x", "unsure", "", None, "rows"), passed("x", "rows")])[0].verdict == "pass"
