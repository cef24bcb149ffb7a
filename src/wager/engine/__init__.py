"""The engine room: sequences, scheduler, runner, the step, and how an engine is built."""
