"""Hypotheses about a training run: files with arms and criteria, their experiments, and verdicts from the metrics."""
