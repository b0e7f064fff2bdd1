"""The seen half of the twelfth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field12_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field12_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field_parts import engine_model, engine_prompts, rows_changed

SEEN = (
    # The environment
    FieldFault(
        "each call answered with the result of the call before",
        "The environment looks at its state before it acts, so that a tool call returns what the call before it found.",
        "Ericcsr/DiffSRL#2, ocram444/EldenRL#2",
        ids("tool-results-mixed", "tools-return-nothing"),
        WITH_TOOLS,
        start=doubles.one_call_late,
    ),
    # Rows
    FieldFault(
        "last turn of each rollout dropped",
        "The last step of each episode is cut off before training, and with it the answer that the reward is about.",
        "NVlabs/GA3C#31",
        ids("sampled-tokens-masked"),
        WITH_TOOLS,
        start=rows_changed(doubles.without_last_turn),
    ),
    FieldFault(
        "rows of several turns dropped by a count of tokens",
        "A row is left out of the loss if its turns have another number of tokens one by one, as all of several turns do.",
        "haotian-liu/LLaVA#661, lm-sys/FastChat#1290, BAAI-DCAI/Bunny#75, allenai/open-instruct#1804",
        ids("sampled-tokens-masked", "drops-are-biased", "no-gradient"),
        WITH_TOOLS,
        start=rows_changed(doubles.several_turns_masked),
    ),
    # The engine
    FieldFault(
        "messages never closed in the engine's prompts",
        "The engine has a chat template of its own, which writes no end token after a message.",
        "utilityai/llama-cpp-rs#1096",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=engine_prompts(doubles.never_closed),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "output head of the engine never loaded",
        "The checkpoint has no head, because it is the embedding, and the engine keeps the random head it was made with.",
        "vllm-project/vllm#53020",
        ids("head-not-tied", "weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.random_head),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "adapter of fused matrices at a third of its scale",
        "Adapters of queries, keys and values are fused into one of three times the rank, and alpha is divided by that rank.",
        "kohya-ss/sd-scripts#2204",
        ids("adapter-scale-differs"),
        EVERYWHERE,
        start=engine_model(doubles.fused_adapters_weaker),
        options="--peft",
        watch_causes=ids("weights-not-synced") | MISMATCH,
    ),
    # The trainer
    FieldFault(
        "every row has the mean advantage of its minibatch",
        "The advantage is averaged over the minibatch before the loss, so that good and bad rollouts get the same.",
        "PacktPublishing/Deep-Reinforcement-Learning-Hands-On#9",
        ids("advantages-wrong", "policy-term-missing", "does-not-overfit", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.mean_advantage),
    ),
    FieldFault(
        "cosine schedule that rises again",
        "The cosine is made for half of the run's steps and goes on after its end, so that the learning rate rises again.",
        "huggingface/transformers#35484, Nerogar/OneTrainer#1604",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.second_half_of_the_wave,
        options="--lr-scheduler-type cosine",
        steps=8,
    ),
)
