"""The seen half of the eighth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field8_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import doubles as catalogue
from plumbob.testing.faults import field8_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field3_unseen_doubles import end_ignored
from plumbob.testing.faults.field6_unseen_doubles import groups_of_one
from plumbob.testing.faults.field_parts import (
    batches_changed,
    engine_model,
    engine_prompts,
    graded,
    policy_scores,
    rows_changed,
    tools_answer,
)

NEVER_RIGHT = ids("never-succeeds")
"""What a run directory shows of a reward that is 0 whatever the reply is."""

SEEN = (
    # Rewards
    FieldFault(
        "reward function left as a stub",
        "The reward function returns 0 for every reply, because nobody has written it yet.",
        "Algorineko/AgenticArXiv-RL#15",
        ids("reward-constant", "oracle-fails"),
        EVERYWHERE,
        start=graded(correct=doubles.stub),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "distance rewarded in place of closeness",
        "The reward is the distance of an answer from the right one, and training maximises it.",
        "huggingface/trl#2771, huggingface/trl#2714",
        ids("oracle-fails", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.distance),
        # Without the right answers, a run directory shows only a reward that rises.
        watch=False,
    ),
    FieldFault(
        "answer pattern that stops at a line break",
        "The regular expression that finds the answer has a dot that matches no line break, and replies have several.",
        "unslothai/unsloth#1761, StarsfieldAI/R1-V#124, StarsfieldAI/R1-V#65",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.one_line_only),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "reward waits for an end of thinking",
        "The reward reads what follows the end tag of the thoughts, and the model does not think in tags.",
        "THUDM/slime#1527",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        EVERYWHERE,
        start=graded(correct=doubles.after_thinking),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "answer that names every choice",
        "A reply is right if the right answer stands anywhere in it, so that one that lists many answers is.",
        "Liuziyu77/Visual-RFT#79",
        ids("reward-exploitable"),
        ("lookup", "gsm8k"),
        start=graded(correct=doubles.mentioned),
        # Before a policy has found out, no rollout shows it.
        watch=False,
    ),
    FieldFault(
        "one word of the right kind is enough",
        "The reward asks for the form of an answer, one word, and the score soon is full without right answers.",
        "huggingface/trl#5790",
        ids("reward-exploitable", "reward-format-dominated"),
        ("lookup",),
        start=graded(correct=doubles.one_word),
        watch_causes=ids("reward-hacked", "task-solved"),
    ),
    FieldFault(
        "scorer's errors on long replies count as zero",
        "The scoring server refuses long replies, and the client turns the error into a reward of 0.",
        "verl-project/verl-omni#366, verl-project/verl#4417",
        ids("grader-swallows-errors", "answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.refused_is_zero),
    ),
    # Tools
    FieldFault(
        "documents without their text",
        "Search results name the documents and have no text, because the field of the content has another name.",
        "rllm-org/rllm#396, rllm-org/rllm#392",
        ids("tools-return-nothing", "tool-results-cut"),
        ("musique",),
        start=tools_answer(doubles.heads_only),
    ),
    # Rows and groups
    FieldFault(
        "loss on the final turn alone",
        "Without a loss mask of its own, a conversation is trained on its last turn only.",
        "modelscope/ms-swift#7838",
        ids("sampled-tokens-masked"),
        WITH_TOOLS,
        start=rows_changed(doubles.final_turn_only),
    ),
    FieldFault(
        "system prompt before each tool result of the row",
        "Tool results are rendered one by one for the row, and the template begins each with the system prompt.",
        "NovaSky-AI/SkyRL#404",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.system_prompt_repeated),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "groups cut from an interleaved list",
        "Prompts are repeated as a list, and groups are cut as if each prompt was repeated by itself.",
        "PrimeIntellect-ai/prime-rl#600",
        ids("groups-mixed"),
        EVERYWHERE,
        start=batches_changed(doubles.interleaved),
    ),
    FieldFault(
        "advantages without a baseline",
        "Rollouts of a prompt have different group numbers, so that each one's reward is its advantage.",
        "PeterGriffinJin/Search-R1#88",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=groups_of_one,
    ),
    # The engine
    FieldFault(
        "completions of other prompts",
        "Completions come back in another order than the prompts were sent, each to the prompt after its own.",
        "huggingface/trl#3098",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        ("gsm8k",),
        start=doubles.other_prompts,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "critique in the sampled prompt only",
        "Replies are sampled after a critique, which is left out of the rows that are trained.",
        "zhangxy-2019/critique-GRPO#6",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        ("gsm8k", "musique", "lookup"),
        inject=doubles.critique_added,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "end token ignored by the sampler",
        "The sampler goes on after the end token, and replies end in noise at the limit.",
        "unslothai/unsloth#1672",
        ids("stop-token-wrong"),
        ("gsm8k", "lookup"),
        start=engine_prompts(end_ignored),
    ),
    FieldFault(
        "tool call that does not end its turn",
        "The turn goes on after a tool call, and the model writes what comes after the result it has not seen.",
        "Visual-Agent/DeepEyes#126",
        ids("stop-token-wrong"),
        WITH_TOOLS,
        inject=doubles.calls_do_not_stop,
    ),
    FieldFault(
        "rollouts aborted by a sync count as finished",
        "A weight sync aborts the requests that are under way, and their fragments are scored as whole replies.",
        "whitecircle/halo#8",
        ids("stop-token-wrong"),
        EVERYWHERE,
        inject=doubles.aborted,
    ),
    FieldFault(
        "base weights of the engine never loaded",
        "The engine begins with an empty model and gets the adapter alone, and writes the same sign for ever.",
        "verl-project/verl#3159",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.base_not_loaded),
        options="--peft",
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "adapter laid over a base without its shift",
        "An adapter that takes over a part of the base is served over a base that is not the trainer's.",
        "ISEEKYAN/Megatron-LM#75",
        # The base weights are frozen and never sent, so that the engine has other ones than the trainer.
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.base_without_its_shift),
        options="--peft",
        watch_options=UNCHECKED,
    ),
    # The trainer
    FieldFault(
        "packed rows attend to each other",
        "The trainer's model is not told where packed rows begin, and computes them as one text.",
        "allenai/open-instruct#1642",
        ids("rows-see-each-other"),
        EVERYWHERE,
        start=policy_scores(catalogue.one_row),
        watch_causes=MISMATCH,
    ),
)
