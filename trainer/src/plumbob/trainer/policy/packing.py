"""Pack rows into microbatches of bounded size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack rows into microbatches of at most `max_tokens` tokens; returns the indices of the rows of each microbatch.

    A row of more than `max_tokens` tokens is a microbatch of its own. Every row is in exactly one microbatch. First-fit
    decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the number of microbatches is at most 11/9 of the
    smallest possible number plus one. The result depends on nothing but the arguments. The longest rows come first, so
    that a microbatch that does not fit into memory fails at the start and not after an hour.
    """
    microbatches: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for k, free in enumerate(room):
            if lengths[i] <= free:
                microbatches[k].append(i)
                room[k] -= lengths[i]
                break
        else:
            microbatches.append([i])
            room.append(max_tokens - lengths[i])
    return microbatches


def pack_evenly(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`pack`, with as many microbatches, but of about equal size where that is possible.

    First fit fills all but the last one, whose few tokens a GPU computes no faster than many. Two other ways are tried, and the
    one whose fullest microbatch is smallest is taken: each row, the longest first, to the microbatch with the fewest tokens
    (Graham, "Bounds on multiprocessing timing anomalies", 1969), good for many rows; and first fit with the smallest limit that
    takes no more microbatches (Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor scheduling", 1978).
    """
    fewest = pack(lengths, max_tokens)
    if len(fewest) < 2:
        return fewest
    fewest_tokens_first: list[list[int]] = [[] for _ in fewest]
    loads = [(0, k) for k in range(len(fewest))]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, k = loads[0]
        fewest_tokens_first[k].append(i)
        heapq.heapreplace(loads, (load + lengths[i], k))
    with_limit, least, most = fewest, sum(lengths) // len(fewest), max_tokens
    while most - least > max(most // 50, 1):
        limit = (least + most) // 2
        if len(packed := pack(lengths, limit)) <= len(fewest):
            with_limit, most = packed, limit
        else:
            least = limit

    def fullest_and_emptiest(packed: list[list[int]]) -> tuple[int, int]:
        sums = [sum(lengths[i] for i in rows) for rows in packed]
        return max(sums), -min(sums)

    return min((fewest, fewest_tokens_first, with_limit), key=fullest_and_emptiest)


def by_prompt(prompts: Sequence[Sequence[int]], shortest: int) -> list[list[int]]:
    """Indices of the rows of each prompt, in order. A prompt of less than `shortest` tokens is not shared: its rows are alone."""
    members: dict[object, list[int]] = {}
    for i, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt) if len(prompt) >= shortest else i, []).append(i)
    return list(members.values())


def pack_prompts(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int, *, shortest: int, once: bool
) -> list[list[int]]:
    """`pack_evenly` for rows that share equal prompts: rows of one prompt are next to each other in one microbatch.

    `prompts`: the ids that each row begins with; those of less than `shortest` tokens are not shared. `once`: a prompt
    counts once for all of its rows in a microbatch. Rows of one prompt that exceed `max_tokens` are divided.
    """
    units: list[list[int]] = []
    costs: list[int] = []
    for rows in by_prompt(prompts, shortest):
        shared = len(prompts[rows[0]]) if once and len(rows) > 1 else 0
        rests = [lengths[i] - shared for i in rows]
        for part in pack_evenly(rests, max_tokens - shared):
            units.append([rows[k] for k in part])
            costs.append(shared + sum(rests[k] for k in part))
    return [[i for k in part for i in units[k]] for part in pack_evenly(costs, max_tokens)]


def pack_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`pack` for rows that are padded to the longest of their microbatch: at most `max_tokens` with the padding.

    Rows of like lengths share a microbatch, the longest first: so padding is little, and each microbatch is as full as
    its longest row allows.
    """
    microbatches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if microbatches and (len(microbatches[-1]) + 1) * lengths[microbatches[-1][0]] <= max_tokens:
            microbatches[-1].append(i)
        else:
            microbatches.append([i])
    return microbatches


def indices_of(starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The places `start` to `start + length - 1` of each range, one range after another; int64.

    Example: indices_of([7, 2], [2, 3]) -> [7, 8, 2, 3, 4]
    """
    sizes = torch.tensor(lengths, dtype=torch.long)
    # Where a range begins among all places, its first place differs by this from its own number there.
    shifts = torch.tensor(starts, dtype=torch.long) - (sizes.cumsum(0) - sizes)
    return torch.arange(int(sizes.sum())) + shifts.repeat_interleave(sizes)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to `device` without waiting for the device.

    An ordinary copy to a GPU waits until all queued work is done, and then the GPU is idle until the next kernel is
    queued. A few such copies in each pass cost a tenth of a step's time.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
