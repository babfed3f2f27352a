"""Messages as the console shows them: search, decoders, traces, explanations, resends."""
