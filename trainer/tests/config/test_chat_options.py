"""--tool-format reaches the chat of training, of evaluations and of `serve`."""

from typing import get_args

import pytest
import torch
from plumbob.console import UserError
from plumbob.rollout.tool_formats import NAMES
from plumbob.testing.vllm_double import Double, serving
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.rollout_options import ToolFormatName
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor.live import load_subject
from plumbob.trainer.inference.load import load_engine
from plumbob.trainer.serving.server import load_server


def test_the_names_of_the_option_are_those_of_the_tool_formats():
    assert set(get_args(ToolFormatName)) == set(NAMES)
    with pytest.raises(UserError, match="tool-format"):
        TrainConfig(tool_format="xml")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"tool_format": "qwen-xml"}], ids=["hermes", "qwen-xml"])
def test_the_option_reaches_every_chat(tmp_path, settings):
    chats = [load_server("tiny", **settings).chat]
    with serving(Double()) as url:
        for engine in ("transformers", "vllm"):
            config = EvaluateConfig(envs=("lookup",), engine=engine, base_url=url, **settings)
            loaded = load_engine(config)
            chats.append(loaded.chat)
            if engine == "vllm":
                loaded.close()
    config = TrainConfig(eval_examples=4, num_generations=4, **settings)
    subject = load_subject(config, join_world(torch.device("cpu")), tmp_path, lambda _: None, 1)
    chats.append(subject.run.sampler.chat)
    subject.close()
    assert [chat.tool_format.name for chat in chats] == [settings.get("tool_format", "hermes")] * 4
