"""The unseen half of the seventeenth set of the field's faults: it is run only to measure.

The set is of the trainer's side: threads in the order in which plain searches return them, listed in
docs/results/field17_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field17_unseen_doubles as doubles
from plumbob.testing.faults.doubles import one_row
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field2_parts import since
from plumbob.testing.faults.field_parts import (
    batches_changed,
    engine_logits,
    engine_updates,
    policy_scores,
    rows_changed,
)

UNSEEN = (
    FieldFault(
        "several samples of a pack in one causal sequence",
        "Packed samples are one long sequence: positions run on, and each sample attends to those before it.",
        "huggingface/nanoVLM#201, huggingface/nanoVLM#204, axolotl-ai-cloud/axolotl#131, hiyouga/LlamaFactory#7318",
        ids("rows-see-each-other", "positions-shifted"),
        EVERYWHERE,
        start=policy_scores(one_row),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "rollout temperature missing from the training forward pass",
        "Rollouts are sampled at a temperature of 0.7, and the trainer's forward pass does not divide the logits by it.",
        "OpenRLHF/OpenRLHF#857",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.at_temperature_one),
        options="--temperature 0.7",
    ),
    FieldFault(
        "schedule as long as the run, stepped once per update",
        "The schedule is as long as the run has steps, and moves on with every optimizer step, of which a step has two.",
        "NovaSky-AI/SkyRL#873",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.twice_as_fast,
        options="--num-iterations 2 --lr-scheduler-type linear",
        watch_causes=ids("optimizer-moves-nothing"),
    ),
    FieldFault(
        "server's own nucleus where requests leave it out",
        "Requests carry a temperature alone, and the server adds the nucleus of 0.8 and the top 20 of the model's files.",
        "huggingface/trl#6608",
        ids("sampling-truncated"),
        EVERYWHERE,
        start=engine_logits(doubles.nucleus, raw=True),
    ),
    FieldFault(
        "merged model rounded to four bits when it is saved",
        "Saving merges the adapter and rounds the sum to four bits, which loses what little a short run has changed.",
        "ARahim3/mlx-tune#15",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.four_bits_saved,
        options="--peft",
    ),
    FieldFault(
        "bounds of groups off by one row",
        "Cut-off rollouts were dropped before rewards were reshaped into groups, so that groups begin one row too late.",
        "allenai/open-instruct#1794",
        ids("groups-mixed", "advantages-wrong"),
        EVERYWHERE,
        start=batches_changed(doubles.bounds_moved),
    ),
    FieldFault(
        "advantages divided among devices in another order than rows",
        "Advantages are divided among devices before microbatches are, so that rows meet the advantages of other rows.",
        "tenstorrent/tt-metal#46548",
        ids("rewards-of-other-rollouts", "advantages-wrong"),
        EVERYWHERE,
        start=doubles.advantages_by_device,
    ),
    FieldFault(
        "prefix of the reply trained as if it were sampled",
        "What opens each reply is given to the engine with the prompt, and is part of the completion in the trained row.",
        "modelscope/ms-swift#10106",
        ids("context-tokens-trained"),
        EVERYWHERE,
        start=rows_changed(doubles.prefix_trained),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "last weight syncs left out as unused",
        "Syncs near the end are left out because no rollouts follow, and one step too early, so that the last rollouts are old.",
        "PrimeIntellect-ai/prime-rl#2896",
        ids("engine-stale", "weights-not-synced"),
        EVERYWHERE,
        start=since(4, lambda begun: engine_updates(doubles.unless(begun))),
        probes=False,
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
)
