"""Runs: how they are started and resumed, and what their directories say."""
