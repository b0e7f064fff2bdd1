"""The probes. Each runs a few checks on a subject and yields one finding per check.

To add a probe, add a module to this folder with a function `probe(subject)` and a number `ORDER`. Probes run in
increasing `ORDER`, so that a failure of one may be the cause of failures of later ones.
"""
