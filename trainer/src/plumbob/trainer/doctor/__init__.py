"""Names the reason why a run does not learn: probes before a run, rules over what a run left behind."""
