"""An OpenAI-compatible HTTP server over the in-process engine."""
