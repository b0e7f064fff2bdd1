"""The probes: each asks a few questions of a subject, in order, and yields a finding for every answer."""
