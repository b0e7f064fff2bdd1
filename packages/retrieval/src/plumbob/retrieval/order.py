"""The order of scores."""

from __future__ import annotations

import numpy as np
from plumbob.retrieval.documents import check_top_k


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Indices of the `top_k` highest of `scores` [N], highest first, equal ones in order of index."""
    check_top_k(top_k)
    if len(scores) > 64 and top_k < len(scores):
        # A partition finds the k-th score; taking all that reach it keeps ties complete for the stable sort.
        floor = -np.partition(-scores, top_k - 1)[top_k - 1]
        reached = np.flatnonzero(scores >= floor)
        return reached[np.argsort(-scores[reached], kind="stable")][:top_k]
    return np.argsort(-scores, kind="stable")[:top_k]
