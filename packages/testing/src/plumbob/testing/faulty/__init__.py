"""Faults and healthy settings as rows, by the stage of a run in which they lie."""
