"""May we afford a guess? Policies that decide how far to draft and what to verify. No torch, no engine."""
