"""A loss, advantages and rewards from the user's own file: what they are given, what mistakes say, and what the doctor says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.doctor import record, stages
from plumbob.doctor.reference.model import load
from plumbob.doctor.reference.rows import load_tokenizer
from plumbob.rollout import Sample
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.algorithm.losses import try_own_loss
from plumbob.trainer.algorithm.own_functions import OwnFunctionError
from plumbob.trainer.cli.train import check_before_loading, configure
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training.train import run

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "training.md"
OPTIONS = {"loss": "loss", "baseline": "advantages", "trained_reward": "reward"}

LIKE_BUILT_IN = """
def loss(tokens, settings):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    bounded = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high)
    gain = (ratio * tokens.advantages).minimum(bounded * tokens.advantages)
    return -(tokens.weights * tokens.corrections * gain).sum()

def advantages(rollouts, settings):
    of = lambda group: [r.reward for r in rollouts if r.group == group]
    return [r.reward - sum(of(r.group)) / len(of(r.group)) for r in rollouts]

def reward(rollouts, settings):
    return [r.reward for r in rollouts]
"""


def train(folder: Path, name: str, steps: int = 2, **settings) -> list[dict]:
    assert run(quick_config(folder, name, max_steps=steps, **settings)) == 0
    return read_metrics(folder / name)


def test_own_functions_that_compute_what_the_built_in_ones_do_train_the_same(tmp_path: Path) -> None:
    (tmp_path / "like.py").write_text(LIKE_BUILT_IN)
    own = {option: f"{tmp_path}/like.py:{name}" for option, name in OPTIONS.items()}
    rows = zip(train(tmp_path, "built-in"), train(tmp_path, "own", **own), strict=True)
    for built_in, ours in rows:
        for name in ("loss", "optimizer/grad_norm", "advantage/mean_abs", "reward/mean"):
            assert ours[name] == pytest.approx(built_in[name], rel=1e-4), name


def test_the_guide_s_functions_train_and_the_doctor_says_that_it_does_not_examine_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = GUIDE.read_text().partition("### A loss, advantages or rewards of your own")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    (tmp_path / "my.py").write_text(code[1])
    plain, ours = (
        train(tmp_path, "plain", 1),
        train(tmp_path, "own", 2, **{option: f"{tmp_path}/my.py:{name}" for option, name in OPTIONS.items()}),
    )
    assert "OTHER REWARD: --trained-reward trains on" in capsys.readouterr().err
    assert ours[0]["reward/mean"] == plain[0]["reward/mean"] and ours[0]["loss"] != plain[0]["loss"]

    found = {}
    for path in sorted((tmp_path / "own" / "records").glob("*.npz")):
        stored = record.read(path)
        assert stored.settings.own == {
            "loss": f"{tmp_path}/my.py:loss",
            "advantages": f"{tmp_path}/my.py:advantages",
        }
        model = load(stored.settings) if stored.step == 0 else None
        examined = stages.Examined(stored, model, load_tokenizer(stored.settings))
        found[stored.step] = stages.examine(examined)
    assert not [str(o) for outcomes in found.values() for o in outcomes if o.verdict == "fail"]
    skipped = {o.evidence for o in found[0] if "user's own" in o.evidence}
    assert skipped == {
        f"the loss is the user's own: {tmp_path}/my.py:loss",
        f"rewards or advantages are the user's own: {tmp_path}/my.py:advantages",
    }
    # The gradient is still examined: it is that of the loss's slopes, whatever made them.
    assert [o.verdict for o in found[0] if o.stage == "gradient"] == ["pass"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def other(tokens, settings): ...", "has no function 'loss'"),
        ("def loss(tokens): ...", "line 1: loss must take 2 arguments"),
        ("x = 1\ndef loss(tokens, settings:\n", "line 2: SyntaxError"),
        (None, "there is no file"),
    ],
)
def test_mistakes_that_the_text_shows_are_refused_before_anything_is_loaded(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "my.py").write_text(text)
    config, _ = configure({"env": ["lookup"], "loss": f"{tmp_path}/my.py:loss"})
    with pytest.raises(UserError, match=re.escape(said)):
        check_before_loading(config, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("\n    return tokens.nothing", "line 2: AttributeError: 'LossInputs' object has no attribute 'nothing'"),
        ("\n    return helper(tokens)\ndef helper(t):\n    return 1 / 0", "line 4: ZeroDivisionError"),
        ("\n    return tokens.logprobs", "line 1: loss must give a tensor of shape []"),
        ("\n    return tokens.logprobs.detach().sum()", "line 1: loss must give a tensor of shape [] with a gradient"),
        ("\n    return 0.5\nimport nonsense_of_mine", "line 3: ModuleNotFoundError"),
        (
            "\n    r = tokens.logprobs.exp()\n    s = (r * r).sum()\n    r.mul_(2)\n    return s",
            "line 1: its gradient: ",
        ),
    ],
)
def test_a_mistake_in_a_loss_is_said_with_its_line_before_a_model_is_loaded(
    tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "my.py").write_text(f"def loss(tokens, settings):{body}\n")
    with pytest.raises(OwnFunctionError, match=re.escape(f"{tmp_path}/my.py, {said}")):
        try_own_loss(TrainConfig(loss=f"{tmp_path}/my.py:loss").objective(), False)


def test_a_loss_has_the_reference_that_the_run_has(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "def loss(tokens, settings):\n    return (tokens.logprobs - tokens.ref_logprobs).sum()\n"
    )
    config = TrainConfig(loss=f"{tmp_path}/my.py:loss", kl_beta=0.1)
    try_own_loss(config.objective(), bool(config.kl_beta))


def test_rewards_and_advantages_must_be_one_finite_number_for_each_rollout(tmp_path: Path) -> None:
    rows = [Sample([1], [True], [0.0], reward, "0/0", "", False) for reward in (0.0, 1.0, float("nan"))]
    for value, said in (
        ("[1.0]", "gives 1 number for 2 rollouts"),
        ("[1.0, 'high']", "must give 2 numbers, one for each rollout, not a list with 'high'"),
        ("[0.0, float('nan')]", "gives nan for rollout 1 of 2"),
        ("None", "must give 2 numbers, one for each rollout, not a NoneType"),
    ):
        path = tmp_path / f"{len(value)}.py"
        path.write_text(f"def f(rollouts, settings):\n    return {value}\n")
        for option in ("trained_reward", "baseline"):
            with pytest.raises(OwnFunctionError, match=re.escape(f"{path}, line 1: f {said}")):
                step_advantages(rows, TrainConfig(**{option: f"{path}:f"}).advantages())
    (tmp_path / "ends.py").write_text("def f(rollouts, settings):\n    exit('enough')\n")
    with pytest.raises(OwnFunctionError, match=r"--advantage: .*ends.py, line 2: it ended the program: enough"):
        step_advantages(rows, TrainConfig(baseline=f"{tmp_path}/ends.py:f").advantages())
    (tmp_path / "waits.py").write_text("async def f(rollouts, settings):\n    return [0.0, 0.0]\n")
    with pytest.raises(OwnFunctionError, match="line 1: f must be a plain function: `def`, not `async def`"):
        TrainConfig(trained_reward=f"{tmp_path}/waits.py:f").own_functions()[0].line()
    (tmp_path / "late.py").write_text("def f(rollouts, settings):\n    for _ in rollouts:\n        yield 1 / 0\n")
    with pytest.raises(OwnFunctionError, match=r"late.py, line 3: ZeroDivisionError"):
        step_advantages(rows, TrainConfig(baseline=f"{tmp_path}/late.py:f").advantages())
    reads = "import argparse\nargparse.ArgumentParser().parse_args()\n"  # a command line, which must not be train's
    (tmp_path / "good.py").write_text(
        f"{reads}def f(rollouts, settings):\n    return [r.reward * 2 for r in rollouts]\n"
    )
    found = step_advantages(rows, TrainConfig(trained_reward=f"{tmp_path}/good.py:f").advantages())
    assert found.values == [-1.0, 1.0, 0.0] and found.non_finite == 1  # a rollout without a reward is not asked about


def test_a_mistake_in_a_later_step_ends_the_run_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late.py").write_text(
        "steps = []\n"
        "def advantages(rollouts, settings):\n"
        "    steps.append(rollouts[0].group.split('/')[0])\n"
        "    if steps[-1] == '2':\n"
        "        raise ValueError('too late')\n"
        "    return [r.reward - 0.5 for r in rollouts]\n"
    )
    own = f"{tmp_path}/late.py:advantages"
    assert run(quick_config(tmp_path, "late", baseline=own, max_steps=5, save_steps=1000)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Stopped in step 3: --advantage: " in said and "late.py, line 5: ValueError: too late" in said
    assert (tmp_path / "late" / "checkpoints" / "step_2").is_dir() and "Resume with: train --resume" in said


def test_a_run_whose_file_is_gone_can_still_be_read(tmp_path: Path) -> None:
    config = TrainConfig(loss="nowhere/my.py:loss", trained_reward="my.py:reward")
    assert TrainConfig(loss=config.loss).loss == str(Path("nowhere/my.py").absolute()) + ":loss"
    for wrong, said in (("grpo", "a built-in one is --loss-type"), ("my.py", "--loss needs FILE.py:FUNCTION")):
        with pytest.raises(UserError, match=said):
            TrainConfig(loss=wrong)
    with pytest.raises(UserError, match=r"--baseline must be one of .* or FILE.py:FUNCTION, not 'men'; did you mean"):
        TrainConfig(baseline="men")
