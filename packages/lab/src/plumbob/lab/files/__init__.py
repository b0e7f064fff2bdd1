"""The files of a lab: hypotheses, README, log; only marked sections of them are written."""
