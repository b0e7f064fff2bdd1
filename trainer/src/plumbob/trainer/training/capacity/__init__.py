"""Whether a run fits into the memory and on the disk that it is given: planned before it starts, and watched while it trains."""
