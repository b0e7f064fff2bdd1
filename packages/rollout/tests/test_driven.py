"""Environments that drive the conversation: the rows are exact, and what cannot be played in process is refused."""

import asyncio
import contextlib
import random
import sys

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import ChatReply, EngineError, Limits, Sampling, ScriptedChat, run_rollout, tasksets, to_sample
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.driven import driver_of, rehearse
from plumbob.rollout.harness import InProcessHarness, LocalEnv
from plumbob.rollout.types import UnsupportedTaskset
from plumbob.testing.exact_rows import assert_exact
from plumbob.testing.upstream_style import FOLDER

PROPERTY = settings(max_examples=30, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def importable():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def game(**given):
    """(taskset's first task, env) of the number game, with the secret number 7."""
    taskset = tasksets.make_taskset(vf.import_taskset("number_game").GameTaskset, "number_game", given)
    task = next(iter(taskset))
    return task.with_data(secret=7), driver_of("number_game", given)


def test_a_driver_takes_a_setting_with_settings_of_its_own():
    task, env = game(task='{"rewards": {"guessed": {"weight": 0.5}}}')
    assert env is not None and env.taskset.config.task == task.config
    assert task.config.rewards["guessed"].weight == 0.5


def play(family, scripted, replies, limits=None, **given):
    task, env = game(**given)
    engine = scripted(family, replies)
    limits = Limits(**{"max_context": 100_000, **(limits or {})})
    sampling = Sampling(max_tokens=200, seed=7)
    return asyncio.run(run_rollout(task, engine, family.chat, sampling, limits, driver=env)), engine


@pytest.mark.parametrize("opens", [False, True])
def test_a_game_is_one_exact_row(family, scripted, opens):
    trace, engine = play(family, scripted, ["2", "no idea", "9?", "7"], opens=opens)
    assert trace.ok, trace.errors
    assert_exact(trace, engine, family)
    assert [type(m).__name__ for m in (n.message for n in trace.nodes)] == ["UserMessage", "AssistantMessage"] * 4
    text = family.text(engine.prompts[-1])
    places = [text.index(part) for part in ("Which is it?", "It is higher.", "Say a number.", "It is lower.")]
    assert places == sorted(places)
    assert {name: r.value for name, r in trace.rewards.items()} == {"guessed": 0.1, "won": 0.25}
    assert trace.metrics["rollout/turns"] == trace.metrics["replies"] == 4
    assert trace.stop_condition == "user_closed" and trace.is_completed


def test_a_won_game_ends_at_once(qwen, scripted):
    trace, engine = play(qwen, scripted, ["I say 7."])
    assert len(engine.prompts) == 1 and trace.reward == pytest.approx(1.1)
    assert to_sample(trace, "g").stop == "user_closed" and not to_sample(trace, "g").truncated


@PROPERTY
@given(seed=st.integers(0, 10_000), opens=st.booleans())
def test_rows_are_exact_whatever_is_sampled(family, scripted, random_ids, seed, opens):
    trace, engine = play(family, scripted, random_ids(family, random.Random(seed)), opens=opens, guesses=5)
    assert trace.ok, trace.errors
    assert_exact(trace, engine, family)


@pytest.mark.parametrize(
    ("replies", "limits", "stop", "turns"),
    [
        (["1"] * 4, {"max_turns": 2}, "max_turns", 2),
        (["1"] * 4, {"max_context": 90}, "max_total_tokens", None),
        (["1 " * 300], {}, "max_turn_tokens", 1),
    ],
)
def test_a_limit_ends_the_game_and_it_is_scored(qwen, scripted, replies, limits, stop, turns):
    trace, engine = play(qwen, scripted, replies, limits)
    assert trace.ok and trace.stop_condition == stop and to_sample(trace, "g").truncated
    assert turns is None or len(engine.prompts) == turns
    assert trace.rewards["won"].value == 0.0 and len(trace.branches) == 1


def test_a_slow_model_ends_the_game_and_it_is_scored(qwen, scripted):
    class Slow(scripted):
        async def generate(self, prompt_ids, sampling):
            if len(self.prompts) == 1:
                await asyncio.sleep(3600)
            return await super().generate(prompt_ids, sampling)

    task, env = game()
    engine, limits = Slow(qwen, ["1", "2"]), Limits(max_seconds=0.5, max_context=10_000)
    trace = asyncio.run(run_rollout(task, engine, qwen.chat, Sampling(), limits, driver=env))
    assert trace.ok and trace.is_timeout and trace.num_turns == 1 and "won" in trace.rewards


def test_a_failing_engine_fails_the_rollout_with_its_own_error(qwen, scripted):
    trace, _ = play(qwen, scripted, ["1", EngineError("the server is gone")])
    assert not trace.ok and [e.type for e in trace.errors] == ["EngineError"]


def test_a_failing_environment_fails_the_rollout(qwen, scripted, monkeypatch):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            raise KeyError("board")

    _, env = game()
    monkeypatch.setattr(type(env), "run", run)
    trace, _ = play(qwen, scripted, ["1"])
    assert not trace.ok and trace.errors[0].type == "KeyError" and trace.num_turns == 1


def test_tools_work_between_the_users_messages(family, scripted, kit, monkeypatch):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            first = await interaction.turn()
            assert [type(m).__name__ for m in first.messages] == ["AssistantMessage", "ToolMessage", "AssistantMessage"]
            assert (await interaction.turn("And now?")).last_reply == "b it is"

    _, env = game()
    monkeypatch.setattr(type(env), "run", run)
    calls = [family.call_text("kit_fetch", {"index": i}) for i in (0, 1)]
    engine = scripted(family, [calls[0], "a it is", calls[1], "b it is"])
    task = kit.Task(kit.Data(prompt="Go.", results=["a", "b"]))
    trace = asyncio.run(run_rollout(task, engine, family.chat, Sampling(), Limits(max_context=10_000), driver=env))
    assert trace.ok, trace.errors
    assert_exact(trace, engine, family)
    assert trace.metrics["rollout/tool_calls"] == 2 and trace.metrics["rollout/tool_errors"] == 0


def test_run_of_the_agent_and_finalize_of_the_environment(qwen, scripted, monkeypatch):
    async def run(self, task, agents):
        trace = await agents.agent.run(task)
        assert trace.is_completed and trace.rewards["guessed"].value == 0.1

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("judged", 0.5)

    _, env = game()
    monkeypatch.setattr(type(env), "run", run)
    monkeypatch.setattr(type(env), "finalize", finalize)
    trace, _ = play(qwen, scripted, ["3"])
    assert trace.ok and trace.reward == pytest.approx(0.6) and trace.stop_condition == "agent_completed"


def test_a_chat_endpoint_plays_too():
    task, env = game()
    script = ScriptedChat([ChatReply("1"), ChatReply("7")])
    trace = asyncio.run(run_rollout(task, script, None, driver=env))
    assert trace.ok and trace.rewards["won"].value == 0.75


def run_twice(self, task, agents):
    async def both():
        await agents.agent.run(task)
        await agents.agent.run(task)

    return both()


async def shows_a_picture(self, task, agents):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    async with agents.agent.interaction(task) as interaction:
        await interaction.turn()
        with contextlib.suppress(TypeError):
            await interaction.turn([{"role": "user", "content": [picture]}])


async def steers(self, task, agents):
    async with agents.agent.interaction(task) as interaction:
        await interaction.send("hurry")


async def provisions(self, task, agents):
    async with agents.agent.provision(task) as box:
        await agents.agent.run(task, runtime=box)


async def untrainable(self, task, agents):
    agents.agent.trainable = False
    await agents.agent.run(task)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (run_twice, "runs its agent more than once"),
        (shows_a_picture, "images"),
        (steers, "sends messages while the model is speaking"),
        (provisions, "provisions a runtime"),
        (untrainable, "marks as not trainable"),
    ],
)
def test_what_only_running_shows_is_seen_in_the_rehearsal(monkeypatch, run, why):
    task, env = game()
    monkeypatch.setattr(type(env), "run", run)
    with pytest.raises(UnsupportedTaskset, match=why):
        rehearse(env, task)


def test_a_rehearsal_leaves_other_failures_to_the_rollouts(monkeypatch):
    async def run(self, task, agents):
        raise RuntimeError("only on Mondays")

    task, env = game()
    rehearse(env, task)
    monkeypatch.setattr(type(env), "run", run)
    rehearse(env, task)


def package(tmp_path, monkeypatch, name, body, exported):
    lines = ["import verifiers.v1 as vf", "from number_game import GameEnv, GameTaskset", body]
    (tmp_path / f"{name}.py").write_text("\n".join([*lines, f"__all__ = {exported}"]))
    monkeypatch.syspath_prepend(tmp_path)
    return name


TWO_SEATS = """
class Config(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
class Two(vf.Env[Config]):
    async def run(self, task, agents): await agents.solver.run(task)
"""
SERVES = "class Serving(GameEnv):\n    async def start(self): pass"
OWN_PROGRAM = """
class Program(vf.Harness[vf.HarnessConfig]):
    async def launch(self, *args): ...
"""
OTHER_MODEL = """
class Config(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(model="gpt-x")
class Other(vf.SingleAgentEnv, vf.Env[Config]): pass
"""
PINNED = OTHER_MODEL.replace('model="gpt-x"', 'harness={"id": "codex"}')


@pytest.mark.parametrize(
    ("name", "body", "env", "why"),
    [
        ("refused_two", TWO_SEATS, "Two", r"2 agents \(solver, critic\)"),
        ("refused_start", SERVES, "Serving", "overrides Env.start"),
        ("refused_harness", OWN_PROGRAM, "Program", "'refused_harness' .Program., a program of its own"),
        ("refused_model", OTHER_MODEL, "Other", "always the model 'gpt-x'"),
        ("refused_pinned", PINNED, "Other", "harness 'codex'"),
    ],
)
def test_an_env_that_cannot_be_played_is_refused_by_what_it_declares(tmp_path, monkeypatch, name, body, env, why):
    package(tmp_path, monkeypatch, name, body, [env, "GameTaskset"])
    with pytest.raises(UnsupportedTaskset, match=why):
        driver_of(name, {})


def test_plain_packages_have_no_driver_of(tmp_path, monkeypatch):
    body = "from plumbob.rollout.harness import InProcessHarness, LocalEnv"
    package(tmp_path, monkeypatch, "plain_local", body, ["InProcessHarness", "LocalEnv", "GameTaskset"])
    package(tmp_path, monkeypatch, "plain_bare", "", ["GameTaskset"])
    assert driver_of("plain_local", {}) is None and driver_of("plain_bare", {}) is None
    assert issubclass(LocalEnv, vf.SingleAgentEnv) and issubclass(InProcessHarness, vf.Harness)


def test_a_local_env_whose_run_is_overridden_drives(tmp_path, monkeypatch):
    body = "from plumbob.rollout.harness import LocalEnv\nclass Mine(LocalEnv):\n    run = GameEnv.run"
    package(tmp_path, monkeypatch, "local_game", body, ["Mine", "GameTaskset"])
    assert type(driver_of("local_game", {})).__name__ == "Mine"


def test_data_of_a_task_that_cannot_be_played_is_refused(kit):
    with pytest.raises(UnsupportedTaskset, match="asks for skills"):
        adapter.check_data(kit.Task(kit.Data(prompt="Go.", skills=["./skill"])))
    with pytest.raises(UnsupportedTaskset, match="has no prompt"):
        adapter.check_supported(kit.Task(kit.Data()))
    adapter.check_supported(kit.Task(kit.Data()), driven=True)
